"""What the tool says to a person whose input is wrong: one message, where it is, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UsageError(Exception):
    """A user's mistake: shown as one message without a traceback, exit code 2.

    Args:
        message: what was wrong and what was expected, in one sentence.
        path: the file that is wrong, if it is a file.
        line: 1-based line in that file.
        column: 1-based column in that file.
    """

    def __init__(
        self, message: str, path: Path | str | None = None, line: int | None = None, column: int | None = None
    ):
        super().__init__(message)
        self.message = message
        self.path = path
        self.line = line
        self.column = column

    def __str__(self) -> str:
        if self.path is None:
            return self.message
        place = ":".join(str(part) for part in (self.path, self.line, self.column) if part is not None)
        return f"{place}: {self.message}"


class ToolError(Exception):
    """What the tool could not do although nothing that it was given is wrong: one message, exit code 4."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest valid one, or all of them when none is near."""
    words = sorted(set(valid))
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "valid: " + ", ".join(words) if words else "none are known"
