"""What a port changes, without running it: as text, as JSON, as a patch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matrix import changes
from matrix.changes import Comparison, categories
from matrix.changes.categories import Line, Sorted

NOTHING_IN_COMMON = "the two files have nothing in common: this is no port of the baseline, but another program"


def as_text(comparison: Comparison, baseline: str, port: str) -> str:
    """Totals, lines by category, and every hunk."""
    found = categories.sort(comparison)
    lines = [f"{baseline} -> {port}: {total(comparison, found)}"]
    if nothing_in_common(comparison):
        lines.append(f"note: {NOTHING_IN_COMMON}")
    by_category = categories.total(found)
    width = max(map(len, by_category), default=0)
    lines += [f"  {category:{width}}  {count}" for category, count in by_category.items()]
    for each in found:
        lines += ["", f"hunk {each.hunk.id}: {place(each.hunk.old)} -> {place(each.hunk.new)}"]
        lines += [_line("-", line) for line in each.deleted]
        lines += [_line("+", line) for line in each.added]
    return "\n".join(lines)


def total(comparison: Comparison, found: Sequence[Sorted]) -> str:
    """`+15 -3 lines in 7 hunks, 10 of communication`."""
    hunks = len(comparison.hunks)
    if not hunks:
        return "the same code"
    words = f"+{comparison.added} -{comparison.deleted} lines in {hunks} hunk{'s' * (hunks > 1)}"
    return f"{words}, {categories.communication(found)} of communication"


def nothing_in_common(comparison: Comparison) -> bool:
    return not comparison.common and bool(comparison.baseline.units) and bool(comparison.port.units)


def place(lines: tuple[int, int]) -> str:
    """`lines 3-5`, `line 3`, or `after line 2` where there is none."""
    first, last = lines
    return f"after line {last}" if first > last else f"line {first}" if first == last else f"lines {first}-{last}"


def _line(sign: str, line: Line) -> str:
    note = f"{line.category}{', communication' if line.communication else ''}"
    text = "    " * line.unit.depth + line.unit.text
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return f"  {sign} {printable}  [{note}]"


def as_json(comparison: Comparison, baseline: str, port: str) -> str:
    """The same as data."""
    found = categories.sort(comparison)

    def lines(some: Iterable[Line]) -> list[dict[str, Any]]:
        return [
            {
                "code": line.unit.text,
                "depth": line.unit.depth,
                "category": line.category,
                "communication": line.communication,
            }
            for line in some
        ]

    data = {
        "baseline": baseline,
        "port": port,
        **comparison.counts.model_dump(),
        "common": comparison.common,
        "communication": categories.communication(found),
        "categories": categories.total(found),
        "changes": [
            {
                "hunk": each.hunk.id,
                "baseline_lines": each.hunk.old,
                "port_lines": each.hunk.new,
                "categories": each.categories,
                "communication": each.communication,
                "deleted": lines(each.deleted),
                "added": lines(each.added),
            }
            for each in found
        ],
    }
    return json.dumps(data, indent=2)


def as_patch(comparison: Comparison, baseline: Path) -> str:
    """The port as a patch of the baseline, for the folder in which the baseline lies."""
    return changes.patch(comparison.baseline, comparison.port.text, baseline.name)
