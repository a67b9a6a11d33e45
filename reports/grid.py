"""The matrix as a table: a line per workload (and further axes), a column per backend, accelerator and layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reports.merge import Row

COLUMN_AXES = ("backend", "accelerator", "layout")


@dataclass(frozen=True)
class Grid:
    """Lines of entries; an entry is a tuple of rows: empty where no such cell is planned, one per machine else.

    Attributes:
        columns: backend, accelerator and layout of each column, equal backends and accelerators beside each other.
        lines: label and entries of each line.
    """

    columns: tuple[tuple[str, str, str], ...]
    lines: tuple[tuple[str, tuple[tuple[Row, ...], ...]], ...]

    def spans(self, depth: int) -> list[tuple[str, int, int]]:
        """Header cells of level `depth` (0 backend, 1 accelerator, 2 layout): text, first column, number of columns."""
        spans: list[tuple[str, int, int]] = []
        previous: tuple[str, ...] | None = None
        for number, column in enumerate(self.columns):
            if column[: depth + 1] == previous:
                text, first, width = spans[-1]
                spans[-1] = (text, first, width + 1)
            else:
                spans.append((column[depth], number, 1))
            previous = column[: depth + 1]
        return spans


def grid(rows: Iterable[Row]) -> Grid:
    """Arrange rows. Columns and lines keep the order in which the plan names them first."""
    entries: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    columns: dict[tuple[str, str, str], None] = {}
    for row in rows:
        backend, accelerator, layout = (row.axes.get(axis, "") for axis in COLUMN_AXES)
        column = (backend, accelerator, layout)
        columns[column] = None
        entries.setdefault(label(row), {}).setdefault(column, []).append(row)
    order = [{name: i for i, name in enumerate(dict.fromkeys(c[depth] for c in columns))} for depth in range(3)]
    ordered = sorted(columns, key=lambda column: [order[depth][column[depth]] for depth in range(3)])
    return Grid(
        tuple(ordered),
        tuple((name, tuple(tuple(line.get(column, ())) for column in ordered)) for name, line in entries.items()),
    )


def label(row: Row) -> str:
    """The line that a row stands in: its workload, and the axes that a definition adds."""
    further = [f"{name}={value}" for name, value in sorted(row.axes.items()) if name not in ("workload", *COLUMN_AXES)]
    return " ".join([row.axes.get("workload", row.cell), *further])
