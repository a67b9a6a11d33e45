"""Verdicts, evidence and causes in words and symbols, the same in every export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from matrix.failures import CAUSES
from matrix.judge import CellVerdict, Verdict
from reports.text import one_line
from reports.units import lines


@dataclass(frozen=True)
class Word:
    """A verdict for a person: its symbol differs from the others in shape, not only in colour."""

    symbol: str
    label: str
    short: str
    meaning: str


VERDICTS: Final[dict[Verdict, Word]] = {
    "as-is": Word("●", "as is", "unchanged", "the baseline script passed, unchanged"),
    "ported": Word("◐", "ported", "changed lines", "the baseline failed, a port of it passed"),
    "broken": Word("✕", "broken", "executed, and failed", "it was executed, and everything failed"),
    "refused": Word("⊘", "refused", "shown not to run", "not executed; the target's compiler, or a trace, refuses it"),
    "unproven": Word("○", "unproven", "not executed", "not executed here, or with nothing to hold the result against"),
    "error": Word("!", "error", "of the tool itself", "the tool itself failed; says nothing about the script"),
}

EVIDENCE: Final[dict[str, str]] = {
    "executed": "executed",
    "compiled": "compiled for the chip, without the chip",
    "traced": "traced: shapes and devices only",
    "lowered": "lowered",
    "none": "no evidence",
}

EXPECTATIONS: Final[dict[str, str]] = {
    "none": "",
    "met": "as expected",
    "passed": "expected to fail, but passed",
    "other-cause": "expected to fail, but for another cause",
    "expired": "the known failure's date has passed",
    "untested": "expected to fail; not executed here",
}


TOOL_ERROR: Final = "error"
"""Stands where a cause would, for an attempt that the tool itself failed."""


@dataclass(frozen=True)
class CauseWords:
    """What a cause means, and what a user can do about it."""

    words: str
    advice: str


def cause(name: str) -> CauseWords:
    """The words of a cause; a name that the table lacks (another tool version wrote it) has none."""
    if name == TOOL_ERROR:
        return CauseWords("The tool itself failed; this says nothing about the script.", "Run it again with --resume.")
    found = CAUSES.get(name)
    return CauseWords(found.words, found.advice) if found else CauseWords("", "")


def short(verdict: CellVerdict) -> str:
    """What stands below the symbol in the matrix: the changed lines, the cause, or the evidence."""
    if verdict.verdict == "as-is":
        return "as is"
    if verdict.verdict == "ported":
        return lines(verdict.changes.added, verdict.changes.deleted) if verdict.changes else "ported"
    if verdict.verdict in ("broken", "refused"):
        return verdict.cause or verdict.verdict
    if verdict.verdict == "unproven":
        return verdict.evidence if verdict.evidence != "none" else "unproven"
    return verdict.verdict


def standing(verdict: CellVerdict) -> str:
    """How the cell stands to what was expected of it, in words; empty when there is nothing to say."""
    if verdict.tool_failed and verdict.verdict != "error":
        reasons = [attempt.reason for attempt in verdict.attempts if attempt.outcome == "error"]
        return one_line(f"an attempt ended in an error of the tool: {reasons[-1] if reasons else ''}".strip(": "))
    words = EXPECTATIONS[verdict.expectation]
    expected = verdict.cell.expectation
    if expected is not None:
        until = f", until {expected.until}" if expected.until else ""
        return f"{words} ({expected.cause}: {one_line(expected.reason)}{until})"
    if verdict.cell.required and not verdict.as_expected and verdict.verdict == "unproven":
        return "required, but not executed"
    return words
