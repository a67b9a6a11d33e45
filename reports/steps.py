"""From one device to N, to M hosts, to another chip: what each backend needs for the step, beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matrix.journal import PlannedCell
from matrix.judge import Verdict
from reports.merge import Evidence, Row
from reports.required import Required, required_of


@dataclass(frozen=True)
class Entry:
    """A source that takes a workload where it should run, or does not.

    Attributes:
        state: `as-is`, `ported`, `broken` (then of the nearest port), or what keeps the cell from being executed.
        source: the script; None where none was executed.
        changes: what it changes; None for the baseline, or where nothing is known.
        accelerators: on which the same holds.
    """

    state: Verdict
    source: str | None
    changes: Required | None
    accelerators: tuple[str, ...]

    @property
    def alike(self) -> object:
        """What must be equal for two entries to be shown as one."""
        each = self.changes
        counts = (each.added, each.deleted, each.hunks, each.communication) if each else None
        return self.state, self.source, counts


@dataclass(frozen=True)
class Step:
    """A workload, where it goes from one device, and what that takes with each backend."""

    workload: str
    to: str
    by_backend: Mapping[str, tuple[Entry, ...]]


def steps(evidence: Evidence) -> list[Step]:
    """Every step of every workload, in the order of the plan; the baseline's own accelerator is no step."""
    found: dict[tuple[str, str], dict[str, list[Entry]]] = {}
    for row in evidence.rows:
        accelerator = row.axes.get("accelerator", "")
        to = destination(row.verdict.cell)
        if to is not None:
            by_backend = found.setdefault((row.axes.get("workload", ""), to), {})
            _add(by_backend.setdefault(row.axes.get("backend", ""), []), _entry(row, accelerator))
    return [
        Step(workload, to, {backend: tuple(entries) for backend, entries in by_backend.items()})
        for (workload, to), by_backend in found.items()
    ]


def destination(cell: PlannedCell) -> str | None:
    """`2 devices (data)`, `2 hosts x 4 devices (data)`, `another chip`; None where the baseline is at home."""
    layout = cell.layout
    if layout.nodes > 1:
        return f"{layout.nodes} hosts x {layout.devices} ({layout.strategy})"
    if layout.devices > 1:
        return f"{layout.devices} devices ({layout.strategy})"
    return None if cell.written_for == cell.axes.get("accelerator") else "another chip"


def _entry(row: Row, accelerator: str) -> Entry:
    verdict = row.verdict
    attempt = verdict.attempt
    passed = verdict.verdict in ("as-is", "ported", "broken")
    source = attempt.source if attempt is not None and passed else None
    return Entry(verdict.verdict, source, required_of(row), (accelerator,))


def _add(entries: list[Entry], new: Entry) -> None:
    for index, each in enumerate(entries):
        if each.alike == new.alike:
            accelerators = tuple(dict.fromkeys(each.accelerators + new.accelerators))
            entries[index] = replace(each, accelerators=accelerators)
            return
    entries.append(new)
