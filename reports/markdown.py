"""`summary.md`: the report as a GitHub job summary or a comment on a pull request, of bounded size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from reports import words
from reports.grid import grid
from reports.merge import Evidence, Row
from reports.metrics import Speed
from reports.overview import Banner, Signature, by_target, expectations, headline, particulars, signatures, tally
from reports.targets import KINDS, coverage
from reports.text import count, one_line
from reports.units import memory, number, seconds

LIMIT = 60_000  # GitHub refuses a comment over 65,536 characters, and cuts a job summary at 1 MiB

# Only what means something inside a line: the texts never begin one.
_SPECIAL = re.compile(r"([\\`*_\[\]|~&<>@#$^\"]|:(?=//))")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;", "|": "&#124;", ":": "&#58;"}


def plain(text: str, limit: int = 300) -> str:
    """Text that renders as itself: no markup, no HTML, no mention of a user, no reference to an issue."""
    return _SPECIAL.sub(lambda m: _ENTITIES.get(m[1]) or f"\\{m[1]}", one_line(text, limit))


def code(text: str, limit: int = 160) -> str:
    """Text as a code span, also inside a table."""
    text = one_line(text, limit).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


class _Page:
    """Lines within a limit; a table that does not fit loses its last lines, and says how many."""

    def __init__(self, limit: int):
        self.lines: list[str] = []
        self.room = limit

    def add(self, *lines: str) -> bool:
        size = sum(len(line) + 1 for line in lines)
        if size > self.room:
            return False
        self.room -= size
        self.lines += lines
        return True

    def table(self, title: str, head: Sequence[str], lines: Iterable[str], share: float, noun: str) -> None:
        """Add a table that may take `share` of the room that is left."""
        lines = list(lines)
        if not lines:
            return
        rule = "|".join(["", *("---" for _ in head), ""])
        top = [f"### {title}", "", "| " + " | ".join(head) + " |", rule]
        note_room = 120
        room = int(self.room * share) - note_room - sum(len(line) + 1 for line in top)
        taken = 0
        for line in lines:
            room -= len(line) + 1
            if room < 0:
                break
            taken += 1
        if taken:
            self.add(*top, *lines[:taken], "")
        if taken < len(lines):
            left = count(len(lines) - taken, noun)
            what = f"{left} left out here" if taken else f"{title}: {left}, too large to show here"
            self.add(f"_{what}; all are in `index.html`._", "")


def summary(evidence: Evidence, banners: Sequence[Banner], limit: int = LIMIT) -> str:
    """The whole summary: headline, caveats, counts, what is not as expected, matrix, failures, throughput."""
    total = tally(evidence.rows)
    legend = " · ".join(f"{w.symbol} {w.label}: {w.meaning}" for w in words.VERDICTS.values())
    legend = f"<sub>{legend}</sub>"
    page = _Page(limit - len(legend) - 1)
    page.add(f"## {headline(total)}", "")
    page.add(f"{particulars(total)} **{expectations(total)}**".strip(), "")
    definition = {journal.run.definition for journal in evidence.journals}
    facts = [
        f"{total.executed:,} of {count(total.total, 'cell')} executed",
        "definition " + ", ".join(code(name, 60) for name in sorted(definition)[:3]),
        "on " + ", ".join(code(name, 60) for name in evidence.machines[:4]),
        f"portmatrix {plain(evidence.journals[-1].run.tool, 40)}",
    ]
    page.add(" · ".join(facts), "")
    for banner in banners[:12]:
        page.add(f"> **{plain(banner.text)}**", "")
    if len(banners) > 12:
        page.add(f"> and {len(banners) - 12} more such notes in `index.html`", "")
    head = ["backend", "accelerator", *(f"{w.symbol} {w.label}" for w in words.VERDICTS.values())]
    page.table("By backend and accelerator", head, _targets(evidence.rows), 0.3, "line")
    page.table(
        "What is known for each target", ["accelerator", "target", *KINDS], _coverage(evidence.rows), 0.2, "line"
    )
    page.table("Not as expected", ["cell", "verdict", "why"], _unexpected(evidence), 0.35, "cell")
    _matrix(page, evidence)
    groups = signatures(evidence.rows)
    page.table(
        "Failures by signature", ["cells", "cause", "message", "where", "for example"], _failures(groups), 0.5, "group"
    )
    page.table(
        "Throughput",
        ["cell", "throughput", "processes", "step", "start-up", "peak memory"],
        _speeds(evidence),
        0.9,
        "cell",
    )
    return "\n".join([*page.lines, legend]) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _named(row: Row, several: bool) -> str:
    return code(row.cell) + (f" on {code(row.machine, 40)}" if several else "")


def _targets(rows: Iterable[Row]) -> Iterable[str]:
    for (backend, accelerator), total in by_target(rows).items():
        numbers = []
        for name in words.VERDICTS:
            text = f"{total.verdicts[name]:,}" if total.verdicts[name] else ""
            if name == "ported" and total.changed:
                text += f" ({total.changed_words})"
            if name == "unproven" and total.evidence_words and total.evidence["none"] < total.verdicts["unproven"]:
                text += f" ({total.evidence_words})"
            numbers.append(text)
        yield _line(code(backend, 60), code(accelerator, 60), *numbers)


def _coverage(rows: Sequence[Row]) -> Iterable[str]:
    found = coverage(rows)
    if not any(each.target for each in found):
        return
    for each in found:
        counts = " | ".join(f"{each.counts[kind]:,}" if each.counts[kind] else "" for kind in KINDS)
        yield f"| {plain(each.accelerator, 40)} | {plain(each.target, 80)} | {counts} |"


def _unexpected(evidence: Evidence) -> Iterable[str]:
    several = len(evidence.machines) > 1
    for row in evidence.rows:
        if not row.unexpected:
            continue
        word = words.VERDICTS[row.verdict.verdict]
        cause = f" {code(row.verdict.cause, 40)}" if row.verdict.cause else ""
        standing = words.standing(row.verdict)
        why = plain(row.verdict.why, 200) + (f" _({plain(standing, 160)})_" if standing else "")
        yield _line(_named(row, several), f"{word.symbol} {word.label}{cause}", why)


def _matrix(page: _Page, evidence: Evidence) -> None:
    table = grid(evidence.rows)
    head = ["", *("<br>".join(code(part, 30) for part in column) for column in table.columns)]

    def mark(row: Row, beside: bool) -> str:
        word = words.VERDICTS[row.verdict.verdict]
        text = words.short(row.verdict)
        text = "" if text == word.label else f" {plain(text, 30)}"
        expected = " ✓expected" if row.verdict.expectation == "met" else ""
        return f"{word.symbol}{text}{expected}" + (f" ({plain(row.machine, 20)})" if beside else "")

    lines = [
        _line(code(label, 60), *("<br>".join(mark(row, len(entry) > 1) for row in entry) for entry in entries))
        for label, entries in table.lines
    ]
    page.table("Matrix", head, lines, 0.6, "workload")


def _failures(groups: Sequence[Signature]) -> Iterable[str]:
    for group in groups:
        number_of = f"{len(group.broken):,}" if group.broken else ""
        if group.ported:
            number_of += f"{' + ' if number_of else ''}{len(group.ported):,} cured by a port"
        cause = words.cause(group.cause)
        said = code(group.cause, 40) + (f" {plain(cause.words, 160)}" if cause.words else "")
        where = code(group.frame, 80) if group.frame else ""
        yield _line(number_of, said, code(group.message, 200), where, code(group.rows[0].cell))


def _speeds(evidence: Evidence) -> Iterable[str]:
    several = len(evidence.machines) > 1
    for row in evidence.rows:
        measured = row.speed
        if measured is None:
            continue
        yield _line(
            _named(row, several),
            rate(measured) + ("" if measured.comparable else " _not comparable_"),
            str(len(measured.values)),
            _median(measured, lambda m: m.step_s.median if m.step_s else None, seconds),
            _median(measured, lambda m: m.startup_s.median if m.startup_s else None, seconds),
            _median(measured, lambda m: m.peak_memory_bytes, memory),
        )


def rate(measured: Speed) -> str:
    """`12.3 k tokens/s (12.1 k to 12.6 k)`."""
    sample = measured.throughput
    if sample is None:
        return "too few steady steps"
    text = f"{number(sample.median)} {plain(measured.unit, 30)}"
    return text if sample.n == 1 else f"{text} ({number(sample.low)} to {number(sample.high)})"


def _median(measured: Speed, pick: Callable[[Speed], float | None], show: Callable[[float], str]) -> str:
    value = pick(measured)
    return "" if value is None else show(value)
