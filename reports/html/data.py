"""Data for the page's script, as JSON that cannot end its own script element."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from markupsafe import Markup

from reports.exports import axis_names
from reports.html.sections import Detail, Group, section
from reports.merge import Row
from reports.text import one_line

CHUNK = 200  # cells: small enough to parse in a blink, large enough that the page has few elements


def as_json(value: Any) -> Markup:
    """JSON in ASCII without `<`, `>` or `&`, so that no text in it can mean anything to an HTML parser."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def index(rows: Sequence[Row], ids: Sequence[str], signatures: dict[int, str]) -> Markup:
    """What the filter looks at: for each row its id, then a value per key, then free text.

    Args:
        rows: in the order of the page.
        ids: of their sections.
        signatures: by position in `rows`, the group of its failure.
    """
    axes = axis_names(rows)
    keys = ["cell", *axes, "verdict", "cause", "evidence", "machine", "expected", "group"]
    table = []
    for number, row in enumerate(rows):
        verdict = row.verdict
        values = [one_line(row.cell, 200), *(one_line(row.axes.get(axis, ""), 120) for axis in axes)]
        values += [verdict.verdict, one_line(verdict.cause or "", 80), verdict.evidence, one_line(row.machine, 120)]
        values += ["no" if row.unexpected else "yes", signatures.get(number, "")]
        table.append([ids[number], *values, one_line(verdict.why, 300)])
    return as_json({"keys": keys, "rows": table})


def chunks(rows: Iterable[Row], detail: Detail) -> Iterator[tuple[str, Markup]]:
    """Name and content of data elements, made when asked for, so that a large report is never whole in memory.

    First the sections of `CHUNK` cells at a time, then, as `shared`, what they refer to: an environment or a
    difference of sources stands in the page once, and `["shared", number]` where a cell shows it.
    """
    waiting = iter(rows)
    for number in count():
        batch = list(islice(waiting, CHUNK))
        if not batch:
            break
        yield f"chunk-{number}", as_json([[_group(group, detail) for group in section(row, detail)] for row in batch])
    yield "shared", as_json([block for _, block in detail.shared.values()])


def _group(group: Group, detail: Detail) -> Group:
    """A group, with a reference in the place of each block that cells share."""
    heading, blocks = group
    return heading, [("shared", detail.shared[id(b)][0]) if id(b) in detail.shared else b for b in blocks]
