"""A plan as a person or another program reads it: plain text, JSON, the matrix of a GitHub workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matrix.plan import Plan, selection_text


def as_json(plan: Plan) -> list[dict[str, Any]]:
    """The cells as plain data: what a journal lists of them, and the sources that may run."""
    rows = []
    for cell in plan.cells:
        baseline, ports = cell.sources()
        rows.append(
            {
                **cell.planned().model_dump(mode="json", exclude_none=True, exclude={"sources"}),
                "implementation": cell.implementation.name if cell.implementation else None,
                "baseline": baseline.name if baseline else None,
                "ports": [port.name for port in ports],
                "run": cell.run.model_dump(mode="json"),
            }
        )
    return rows


def as_github(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """A value for `strategy.matrix` of a GitHub workflow: one job for each backend and accelerator.

    A matrix may have 256 jobs and a plan many more cells, so a job runs a group: `portmatrix run --select` takes its
    `select`.
    """
    groups: dict[tuple[str, str], int] = {}
    for cell in plan.cells:
        group = cell.axes["backend"], cell.axes["accelerator"]
        groups[group] = groups.get(group, 0) + 1
    jobs = []
    for (backend, accelerator), cells in groups.items():
        select = selection_text({**plan.chosen, "backend": (backend,), "accelerator": (accelerator,)})
        jobs.append({"backend": backend, "accelerator": accelerator, "select": select, "cells": cells})
    return {"include": jobs}


def as_table(plan: Plan, notes: Mapping[str, str]) -> str:
    """The cells as plain text, one a line: id, sources that may run, and the note under the cell's id."""
    rows = [("CELL", "SOURCES", "NOTE")]
    for cell in plan.cells:
        baseline, ports = cell.sources()
        names = ", ".join(source.name for source in ((baseline, *ports) if baseline else ports))
        rows.append((cell.id, names or "-", notes.get(cell.id, "")))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = (f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows)
    return "\n".join(lines) + "\n"
