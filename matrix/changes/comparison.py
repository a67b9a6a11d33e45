"""How a port differs from its baseline, statement by statement; and the port with some of its changes taken back.

Both are parsed with `ast` and compared as sequences of units (`script.py`), each of which counts as one line. So
formatting, quotes, comments and docstrings cost nothing; a statement that moves into a block is one line deleted and
one added.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matrix.changes import script
from matrix.changes.script import Script, Unit
from matrix.errors import UsageError
from matrix.journal import Changes

MANY = 1000  # units; of sources that are both longer, frequent lines are not matched, which would take minutes


@dataclass(frozen=True)
class Hunk:
    """Changes with nothing unchanged between them.

    Attributes:
        id: counts from 1 in the order of the port.
        deleted: the units of the baseline that it replaces.
        added: the units of the port.
        old: first and last line in the baseline, from 1; `(n + 1, n)` where it only adds, after line n.
        new: first and last line in the port, in the same way.
        at: where the units are: the ranges in the baseline's and in the port's units.
    """

    id: int
    deleted: tuple[Unit, ...]
    added: tuple[Unit, ...]
    old: tuple[int, int]
    new: tuple[int, int]
    at: tuple[range, range]


@dataclass(frozen=True)
class Comparison:
    """A port against its baseline."""

    baseline: Script
    port: Script
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> int:
        return sum(len(hunk.added) for hunk in self.hunks)

    @property
    def deleted(self) -> int:
        return sum(len(hunk.deleted) for hunk in self.hunks)

    @property
    def common(self) -> int:
        """How many lines are the same in both."""
        return len(self.port.units) - self.added

    @property
    def counts(self) -> Changes:
        return Changes(added=self.added, deleted=self.deleted, hunks=len(self.hunks))


def compare(baseline: str, port: str) -> Comparison:
    """Compare two texts.

    Raises:
        UsageError: one of them does not parse.
    """
    return compare_scripts(script.parse(baseline), script.parse(port))


def compare_files(baseline: Path, port: Path) -> Comparison:
    """Compare two files.

    Raises:
        UsageError: one of them cannot be read as a Python script; with its place.
    """
    return compare_scripts(script.read(baseline), script.read(port))


def compare_scripts(baseline: Script, port: Script) -> Comparison:
    """Compare two sources that parse."""
    hunks: list[Hunk] = []
    before, after = [unit.same for unit in baseline.units], [unit.same for unit in port.units]
    for a1, a2, b1, b2 in differences(before, after):
        hunk = Hunk(
            id=len(hunks) + 1,
            deleted=baseline.units[a1:a2],
            added=port.units[b1:b2],
            old=_lines(baseline, a1, a2),
            new=_lines(port, b1, b2),
            at=(range(a1, a2), range(b1, b2)),
        )
        hunks.append(hunk)
    return Comparison(baseline, port, tuple(hunks))


def differences(before: Sequence[object], after: Sequence[object]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges in which two sequences differ."""
    low, high = 0, 0
    shorter = min(len(before), len(after))
    while low < shorter and before[low] == after[low]:
        low += 1
    while high < shorter - low and before[-1 - high] == after[-1 - high]:
        high += 1
    inner = before[low : len(before) - high], after[low : len(after) - high]
    matcher = difflib.SequenceMatcher(None, *inner, autojunk=min(map(len, inner)) > MANY)
    for tag, a1, a2, b1, b2 in matcher.get_opcodes():
        if tag != "equal":
            yield low + a1, low + a2, low + b1, low + b2


def count(baseline: Path, port: Path) -> Changes:
    """Added and deleted lines, and hunks, from the baseline to the port; of raw lines if one does not parse."""
    try:
        return compare_files(baseline, port).counts
    except UsageError:
        before, after = (_code_lines(path) for path in (baseline, port))
        found = list(differences(before, after))
        added, deleted = sum(b2 - b1 for _, _, b1, b2 in found), sum(a2 - a1 for a1, a2, _, _ in found)
        return Changes(added=added, deleted=deleted, hunks=len(found))


def without(comparison: Comparison, hunks: Collection[int]) -> str:
    """The port with some hunks taken back: their lines are the baseline's, all others stay as they are written.

    Indentation is adjusted where the two files indent differently, a block that is left without a statement gets a
    `pass`, and statements that share a line get lines of their own where only some of them are taken back. The result
    may still not parse: an `else` whose `if` is taken back.

    Args:
        hunks: ids of the hunks that are taken back.
    """
    baseline, port = comparison.baseline, comparison.port
    chosen: list[tuple[Script, int]] = []
    done = 0
    for hunk in comparison.hunks:
        if hunk.id in hunks:
            old, new = hunk.at
            chosen += [(port, index) for index in range(done, new.start)]
            chosen += [(baseline, index) for index in old]
            done = new.stop
    chosen += [(port, index) for index in range(done, len(port.units))]
    return _Composer(port, chosen).text()


def patch(baseline: Script, text: str, name: str) -> str:
    """What turns the baseline into another text, as `git apply` and `patch -p1` take it.

    Args:
        name: the file's path in the folder in which the patch is applied.
    """
    before, after = _at_newlines(baseline.text), _at_newlines(text)
    lines = list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=3))
    if " " in name:
        lines[:2] = [f"{line[:-1]}\t\n" for line in lines[:2]]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _at_newlines(text: str) -> list[str]:
    """The lines as tools that patch see them."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + [last] * bool(last)


def _lines(source: Script, start: int, stop: int) -> tuple[int, int]:
    if start < stop:
        return source.units[start].first + 1, source.units[stop - 1].end
    after = source.units[start - 1].end if start else source.prologue
    return after + 1, after


def _code_lines(path: Path) -> list[str]:
    """The lines of a file that is no Python this interpreter reads; none when there is no such file."""
    try:
        text = script.read_bytes(path).decode("utf-8", "replace")
    except UsageError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


class _Composer:
    """Writes units of two sources as one."""

    def __init__(self, port: Script, chosen: Sequence[tuple[Script, int]]):
        self.port = port
        self.chosen = chosen
        self.out: list[str] = list(port.lines[: port.prologue])
        self.indents: list[str] = [""]
        self.last: Unit | None = None

    def text(self) -> str:
        position = 0
        while position < len(self.chosen):
            source, index = self.chosen[position]
            stop = self.on_one_line(position)
            if stop is not None:
                self.raw(source, index, index + stop - position)
                position = stop
            else:
                self.single(source, index)
                position += 1
        self.close(0)
        end = self.port.units[-1].end if self.port.units else self.port.prologue
        self.out += self.port.lines[end:]
        return "".join(self.out)

    def on_one_line(self, position: int) -> int | None:
        """Where the units that share lines with this one end, if all of them are chosen and none else joins them."""
        source, index = self.chosen[position]
        units = source.units
        if units[index].shared:
            return None
        count = 1
        while index + count < len(units) and units[index + count].shared:
            count += 1
        if self.chosen[position : position + count] != [(source, index + i) for i in range(count)]:
            return None
        if position + count < len(self.chosen) and count > 1:
            after, number = self.chosen[position + count]
            if after.units[number].depth > units[index].depth:  # `if x: y`, and a second statement for the block
                return None
        return position + count

    def raw(self, source: Script, start: int, stop: int) -> None:
        """Units with all of their lines, and the comments above them."""
        unit = source.units[start]
        self.close(unit.depth)
        for line in source.lines[source.lead(start) : unit.first]:
            self.line(line)
        first = source.lines[unit.first]
        code = first.lstrip(" \t\f")
        self.line(self.indent(unit.depth, first[: len(first) - len(code)]) + code)
        for line in source.lines[unit.first + 1 : source.units[stop - 1].end]:
            self.line(line)
        self.last = source.units[stop - 1]
        if stop - start > 1 and self.last.depth > unit.depth:
            del self.indents[unit.depth + 1 :]

    def single(self, source: Script, index: int) -> None:
        """A unit without the rest of its line."""
        unit = source.units[index]
        self.close(unit.depth)
        self.line(self.indent(unit.depth, "") + unit.text + self.port.newline)
        self.last = unit

    def indent(self, depth: int, written: str) -> str:
        """The indentation of a unit: that of its block, or for the first one of a block its own if that is deeper."""
        del self.indents[depth + 1 :]
        if depth == len(self.indents):
            outer = self.indents[-1]
            deeper = written.startswith(outer) and len(written) > len(outer)
            self.indents.append(written if deeper else outer + ("\t" if outer.startswith("\t") else "    "))
        return self.indents[depth] if depth < len(self.indents) else written

    def close(self, depth: int) -> None:
        """Give a header that no statement follows one that does nothing."""
        if self.last is not None and self.last.opens and depth <= self.last.depth:
            self.line(self.indent(self.last.depth + 1, "") + "pass" + self.port.newline)
        self.last = None

    def line(self, text: str) -> None:
        """A line with the port's line end, below one that has an end."""
        if self.out and not self.out[-1].endswith(("\n", "\r")):
            self.out[-1] += self.port.newline
        code = text.rstrip("\r\n")
        self.out.append(code + self.port.newline if code != text else code)
