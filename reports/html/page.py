"""The page: one self-contained `index.html` from the merged records."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from matrix.judge import Verdict, exit_code
from reports import units, words
from reports.grid import Grid, grid, label
from reports.html import changes, data
from reports.html.sections import Detail, section
from reports.merge import Evidence, Row
from reports.metrics import Speed
from reports.overview import (
    Banner,
    Tally,
    by_target,
    expectations,
    headline,
    last_moment,
    signatures,
    tally,
)
from reports.portability import Portability
from reports.targets import KINDS, Coverage, coverage
from reports.text import count, one_line, visible

FOLDER = Path(__file__).parent
INLINE_CELLS = 400
"""Up to here the sections are in the page itself, readable without its script; beyond, the script draws them."""
LEAN_CELLS = 3_000
"""Beyond here, cells that run are shown without drawings and logs, and tracebacks are shorter."""
SHOWN_LINES = 100
"""Lines of the matrix that are laid out at once; a button shows the rest. Without script all of them are shown."""
UNSCRIPTED_STYLE = ".matrix tr[hidden] { display: table-row !important; } #more { display: none; }"
MOST_ENTRIES = 100
"""Unexpected cells, groups of failures and tables of throughput in the page; what is left out is said there."""


@dataclass(frozen=True)
class Segment:
    """A part of the bar of a backend and accelerator."""

    verdict: Verdict
    x: float
    width: float


@dataclass(frozen=True)
class SpeedLine:
    """A measured cell.

    Attributes:
        id: of its section.
        share: its throughput over that of the fastest comparable one in the same layout; None where it has no peer.
        bar: its throughput in per cent of the largest beside it, for the eye.
        first: whether a layout begins here.
    """

    row: Row
    id: str
    speed: Speed
    share: float | None
    bar: float
    first: bool


def write_page(
    evidence: Evidence, banners: Sequence[Banner], path: Path, today: datetime.date, portable: Sequence[Portability]
) -> None:
    """Write the page. Its size is bounded per cell; what is left out of a very large report is said in it."""
    rows = evidence.rows
    ids = [section_id(row) for row in rows]
    by_row = {id(row): name for row, name in zip(rows, ids, strict=True)}
    groups = signatures(rows)
    group_names = {id(row): f"g{n}" for n, group in enumerate(groups, 1) for row in group.rows}
    in_group = {n: group_names[id(row)] for n, row in enumerate(rows) if id(row) in group_names}
    lean, inline = len(rows) > LEAN_CELLS, len(rows) <= INLINE_CELLS
    detail = Detail(lean=lean)
    script = (FOLDER / "script.js").read_text(encoding="utf-8")
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    total, table = tally(rows), grid(rows)
    measured = _measured(rows)
    context: dict[str, Any] = {
        "policy": _policy([script], [style, UNSCRIPTED_STYLE]),
        "unscripted_style": Markup(UNSCRIPTED_STYLE),
        "shown_lines": SHOWN_LINES,
        "script": Markup(script),
        "style": Markup(style),
        "title": ", ".join(dict.fromkeys(journal.run.definition for journal in evidence.journals)),
        "headline": headline(total),
        "expectations": expectations(total),
        "facts": _facts(evidence, total),
        "machines": _machines(evidence),
        "banners": banners,
        "targets": [(b, a, each, _bar(each)) for (b, a), each in by_target(rows).items()],
        "coverage": _coverage(rows),
        "kinds": KINDS,
        "total": total,
        "verdict_words": words.VERDICTS,
        "unexpected": [row for row in rows if row.unexpected],
        "several": len(evidence.machines) > 1,
        "grid": table,
        "edges": _edges(table),
        "groups": groups,
        "speeds": [_speed_lines(key, pairs, by_row) for key, pairs in list(measured.items())[:MOST_ENTRIES]],
        "more_speeds": max(0, len(measured) - MOST_ENTRIES),
        "changed": changes.section(evidence, portable),
        "rows": rows,
        "ids": by_row,
        "inline": inline,
        "lean": lean,
        "sections": ((row, section(row, detail)) for row in rows) if inline else (),
        "chunks": () if inline else data.chunks(rows, detail),
        "chunk": data.CHUNK,
        "index": data.index(rows, ids, in_group),
        "most": MOST_ENTRIES,
        "exit_code": exit_code(evidence.verdicts),
        "made": today.isoformat(),
    }
    template = environment().get_template("page.html.j2")
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for part in template.generate(context):
            file.write(part)


def environment() -> Environment:
    """Jinja2 with autoescape; every text that a template prints is in visible form, whatever the record held."""
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    made.filters |= {
        "seconds": units.seconds,
        "memory": units.memory,
        "number": units.number,
        "count": count,
        "one_line": one_line,
        "url": web_address,
        "row_key": id,
        "markup": Markup,
    }
    made.globals |= {
        "short": words.short,
        "standing": words.standing,
        "cause": words.cause,
        "efficiency": changes.efficiency,
        "unknown_convergence": changes.unknown_convergence,
    }
    return made


def section_id(row: Row) -> str:
    """The same in every report, so that a link to a cell stays good."""
    name = f"{row.cell}\0{row.machine}".encode("utf-8", "backslashreplace")
    return "c-" + hashlib.sha256(name).hexdigest()[:12]


def web_address(text: str) -> str | None:
    """`text` if it is an address that is safe to follow, else None."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    return text if parts.scheme in ("http", "https") and parts.netloc and visible(text) == text else None


def _policy(scripts: list[str], styles: list[str]) -> str:
    """Nothing but our own script and style may run, and nothing may be fetched: the second wall behind escaping."""

    def marks(texts: list[str]) -> str:
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    allowed = f"script-src {marks(scripts)}; style-src {marks(styles)}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _coverage(rows: Sequence[Row]) -> list[Coverage]:
    """What is known for each target; empty where nothing was compiled for one, since `by_target` then says it all."""
    found = coverage(rows)
    return found if any(each.counts[kind] for each in found for kind in KINDS[1:5]) else []


def _facts(evidence: Evidence, total: Tally) -> list[tuple[str, str]]:
    first, last = evidence.journals[0], evidence.journals[-1]
    when = units.span(first.run.started, max(last_moment(journal) for journal in evidence.journals))
    return [
        ("Executed", f"{total.executed:,} of {count(total.total, 'cell')}"),
        ("When", when),
        ("Tool", f"portmatrix {last.run.tool}"),
    ]


def _machines(evidence: Evidence) -> list[tuple[str, str]]:
    """Name and description of each machine."""
    return list({journal.run.machine: _host(journal.run.host) for journal in evidence.journals}.items())


def _host(host: dict[str, Any]) -> str:
    parts = [str(host[key]) for key in ("cpu", "os") if host.get(key)]
    if isinstance(host.get("cores"), int):
        parts.insert(1, count(host["cores"], "core"))
    if isinstance(host.get("memory_bytes"), int):
        parts.append(units.memory(host["memory_bytes"]))
    devices = host.get("devices")
    if isinstance(devices, list):
        kinds = {str(kind): devices.count(kind) for kind in devices if isinstance(kind, str) and kind != "cpu"}
        parts += [f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items()]
    return ", ".join(parts)


def _bar(total: Tally) -> list[Segment]:
    segments, x = [], 0.0
    for verdict in words.VERDICTS:
        width = 100 * total.verdicts[verdict] / total.total
        if width:
            segments.append(Segment(verdict, x, width))
        x += width
    return segments


def _edges(table: Grid) -> list[str]:
    """For each column, the class that draws a line before it where a backend or an accelerator begins."""
    edges = [""]
    for before, column in pairwise(table.columns):
        edges.append("" if before[:2] == column[:2] else "edge" if before[0] == column[0] else "edge strong")
    return edges


Key = tuple[str, str, str]
"""Line of the matrix, accelerator and machine: what is measured stands beside each other only within these."""


def _measured(rows: Iterable[Row]) -> dict[Key, list[tuple[Row, Speed]]]:
    found: dict[Key, list[tuple[Row, Speed]]] = {}
    for row in rows:
        if row.speed is not None:
            key = label(row), row.axes.get("accelerator", ""), row.machine
            found.setdefault(key, []).append((row, row.speed))
    return found


def _speed_lines(key: Key, pairs: list[tuple[Row, Speed]], ids: dict[int, str]) -> tuple[Key, list[SpeedLine]]:
    order = list(dict.fromkeys(row.axes.get("layout", "") for row, _ in pairs))
    pairs = sorted(pairs, key=lambda pair: order.index(pair[0].axes.get("layout", "")))
    top = max((s.throughput.median for _, s in pairs if s.throughput), default=0) or 1
    lines, layout = [], None
    for row, each in pairs:
        lines.append(_speed_line(row, each, pairs, top, ids[id(row)], row.axes.get("layout") != layout))
        layout = row.axes.get("layout")
    return key, lines


def _speed_line(row: Row, each: Speed, pairs: list[tuple[Row, Speed]], top: float, name: str, first: bool) -> SpeedLine:
    rate = each.throughput.median if each.throughput else 0.0
    peers = [
        other.throughput.median
        for other_row, other in pairs
        if other.throughput and other.comparable and other.unit == each.unit
        if other_row.axes.get("layout") == row.axes.get("layout")
    ]
    share = rate / max(peers) if each.comparable and each.throughput and len(peers) > 1 and max(peers) else None
    return SpeedLine(row, name, each, share, 100 * rate / top, first)
