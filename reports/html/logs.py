"""The end of a rank's log, from a file that must lie within the run's folder."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from reports.text import clipped, count, one_line

LINES = 200


@dataclass
class LogReader:
    """Reads the ends of logs until the room for all logs of a report is used up.

    Attributes:
        per_file: how many bytes of a log's end are read.
        room: how many bytes are left for all further logs.
    """

    per_file: int = 16_384
    room: int = 24 * 2**20

    def tail(self, folder: Path, name: str) -> str:
        """The last lines of the log `name`; in brackets why there is none.

        Only a regular file within `folder` is read, links followed; a name may come from a foreign journal.
        """
        shown = one_line(name)
        if self.room <= 0:
            return f"[left out: the logs of this report have no more room; the file is {shown}]"
        try:
            path = (folder / name).resolve(strict=True)
            if not path.is_relative_to(folder.resolve(strict=True)):
                return f"[not read: {shown} lies outside the run's folder]"
            text, skipped = self._read(path)
        except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL byte; RuntimeError: a loop of links
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "no such file"
            return f"[missing: {shown}: {reason}]"
        lines = text.splitlines()
        note = ""
        if skipped or len(lines) > LINES:
            what = count(skipped, "byte") if skipped else count(len(lines) - LINES, "line")
            note = f"[the first {what} left out; the whole is {shown}]\n"
        return note + clipped("\n".join(lines[-LINES:]), self.per_file) if lines else f"[empty: {shown}]"

    def _read(self, path: Path) -> tuple[str, int]:
        """Text of the end of a file, and how many bytes before it are left out."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a regular file")
            start = max(0, status.st_size - self.per_file)
            data = os.pread(descriptor, self.per_file, start)
        finally:
            os.close(descriptor)
        self.room -= len(data)
        return data.decode("utf-8", "replace"), start
