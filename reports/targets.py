"""What is known for each target: how much of the matrix was executed there, compiled, traced or lowered for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from matrix.journal import AttemptRecord
from matrix.judge import STRENGTH
from reports.merge import Row

KINDS: Final = ("executed", "compiled", "traced", "lowered", "refused", "nothing")
"""From the strongest evidence that a cell runs to none; `refused` is the no of its compiler or of a trace."""


@dataclass(frozen=True)
class Coverage:
    """The cells that were asked of one target.

    Attributes:
        accelerator: its kind, as on the axis.
        target: the chips that were compiled for; empty for the accelerator itself, and for evidence about any chip.
        counts: cells by what is known of them, one of `KINDS`.
    """

    accelerator: str
    target: str
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()


def coverage(rows: Iterable[Row]) -> list[Coverage]:
    """A line for each accelerator and each target that was compiled for, in the order of the plan."""
    found: dict[tuple[str, str], Coverage] = {}
    for row in rows:
        accelerator = row.axes.get("accelerator", "")
        for target, kind in _known(row).items():
            line = found.setdefault((accelerator, target), Coverage(accelerator, target))
            line.counts[kind] += 1
    order = list(dict.fromkeys(accelerator for accelerator, _ in found))
    return sorted(found.values(), key=lambda each: (order.index(each.accelerator), each.target))


def _known(row: Row) -> dict[str, str]:
    """For each target of a cell what is known of it there; the accelerator itself is the empty one."""
    if row.verdict.executed:
        return {"": "executed"}
    found: dict[str, str] = {}
    for attempt in shown(row):
        name = attempt.target.about if attempt.target and attempt.target.name != "any" else ""
        kind: str = attempt.evidence if attempt.outcome == "pass" else "nothing"
        if attempt.outcome == "fail" and attempt.evidence != "none":
            kind = "refused"
        found[name] = min(found.get(name, "nothing"), kind, key=KINDS.index)
    return found or {"": "nothing"}


def shown(row: Row) -> list[AttemptRecord]:
    """The attempts about a target that count now, the strongest evidence first."""
    about = [each for each in row.verdict.current if each.target is not None]
    return sorted(about, key=lambda each: STRENGTH.index(each.evidence))
