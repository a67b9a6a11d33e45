"""What the search for hunks that can go has settled, as the record that a journal keeps and in words."""

from __future__ import annotations

from collections.abc import Iterable

from matrix.changes import Comparison, apis, categories
from matrix.changes.removal import Settled
from matrix.changes.text import place
from matrix.journal import HunkProof


def described(comparison: Comparison, settled: Settled) -> HunkProof:
    """The record of a hunk."""
    sorted_ = categories.sort(comparison)[settled.hunk - 1]
    hunk, trial, pace = sorted_.hunk, settled.trial, settled.pace
    counted = sorted_.categories
    return HunkProof(
        id=hunk.id,
        old=hunk.old,
        new=hunk.new,
        added=len(hunk.added),
        deleted=len(hunk.deleted),
        categories={name: counted[name] for name in apis.CATEGORIES if counted[name]},
        communication=sorted_.communication,
        verdict=settled.verdict,
        why=_why(settled),
        failure=trial.failure if trial and trial.outcome == "fail" else None,
        together=sorted(settled.together),
        needed_by=sorted(settled.needed_by),
        slowdown=pace.slowdown if pace else None,
    )


def _why(settled: Settled) -> str:
    trial, pace = settled.trial, settled.pace
    together = f" together with hunk {listed(settled.together)}" if settled.together else ""
    slower = f"{100 * (pace.slowdown - 1):+.0f} % step time" if pace and pace.slowdown else "speed not measured"
    if settled.verdict == "performance" and pace is None:
        return f"the cell passes without it{together}, but never stops compiling"
    if settled.verdict == "performance":
        return f"the cell passes without it{together}, but is slower: {slower}"
    if settled.verdict == "idle":
        noise = ", within noise" if pace and pace.slowdown else ""
        return f"the cell passes without it{together}; {slower}{noise}"
    if trial is not None and trial.outcome == "fail":
        if trial.failure is None:
            return trial.reason or "without it the cell fails"
        return f"{trial.failure.cause}: {trial.failure.message}"
    if settled.needed_by:
        return f"hunk {listed(settled.needed_by)} uses what it defines"
    return (trial.reason if trial else None) or "could not be run"


def lines(hunk: HunkProof) -> str:
    """Which hunk it is, for a line of progress: `3 (lines 31-34, process group and launch)`."""
    return f"{hunk.id} ({place(hunk.new)}, {max(hunk.categories, key=lambda name: hunk.categories[name], default='')})"


def listed(hunks: Iterable[int]) -> str:
    """Their numbers in order: `1, 5`."""
    return ", ".join(map(str, sorted(hunks)))
