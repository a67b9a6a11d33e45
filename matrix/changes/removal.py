"""Which hunks of a port can be taken back: one after another, what uses a name before what defines it."""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from matrix.changes import Comparison, Hunk, without
from matrix.changes.apis import COMMUNICATION, WRAPPING, category_of
from matrix.changes.categories import Names
from matrix.changes.script import Script, Unit, parses
from matrix.journal import Pace, Trial

Hunks = frozenset[int]
NONE: Hunks = frozenset()
GROUP = "(process group)"
"""Stands for torch's default process group, which calls use without naming it."""
_MAKES_GROUP = ("torch.distributed.init_process_group", "torch.distributed.init_device_mesh")


@dataclass(frozen=True)
class Settled:
    """What is known of a hunk when the search has settled it.

    Attributes:
        verdict: `required`; `performance`, when the cell passes without it, but is slower or compiles at every step;
            `idle`; or `unproven` when it could not be run.
        trial: the run without it that decided.
        together: idle hunks that had to be taken back with it.
        needed_by: hunks that are kept and use a name that only it defines.
        pace: how much slower the cell is without it, where that was measured.
    """

    hunk: int
    verdict: Literal["required", "performance", "idle", "unproven"]
    trial: Trial | None = None
    together: Hunks = NONE
    needed_by: Hunks = NONE
    pace: Pace | None = None


class Dependencies:
    """Which hunks must be taken back together so that every name that is used is still defined."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison
        self.hunks = {hunk.id: hunk for hunk in comparison.hunks}
        self.before = _Uses(comparison.baseline)
        self.after = _Uses(comparison.port)
        self.known: dict[Hunks, Hunks] = {}
        self.allowed = self.missing(NONE)

    def closure(self, taken: Hunks) -> Hunks:
        """Some hunks, and all that have to go with them."""
        found = self.known.get(taken)
        if found is None:
            wanted = taken
            while more := self.partners(wanted) - wanted:
                wanted |= more
            found = self.known[taken] = wanted
        return found

    def partners(self, taken: Hunks) -> Hunks:
        """Hunks without which taking back some others leaves a name undefined, or no Python."""
        missing = self.missing(taken)
        found = {
            hunk.id
            for hunk in self.hunks.values()
            if hunk.id not in taken
            and (missing & self.after.loads(hunk.added) or missing & self.before.bound(hunk.deleted))
        }
        if not found and not parses(without(self.comparison, taken)):
            around = {hunk for each in taken for hunk in (each - 1, each + 1)} & self.hunks.keys() - taken
            whole = [hunk for hunk in sorted(around) if parses(without(self.comparison, taken | {hunk}))]
            found = set(whole[:1]) or around
        return frozenset(found)

    def missing(self, taken: Hunks) -> frozenset[str]:
        """Names that are used and nowhere defined when some hunks are taken back, and are in the port itself."""
        loads: set[str] = set()
        bound: set[str] = set()
        for uses, unit in self.units(taken):
            loads |= uses.of(unit)[0]
            bound |= uses.of(unit)[1]
        if "*" in bound:
            return frozenset()  # `from ... import *` may define anything
        return frozenset(loads - bound - _BUILTINS) - (self.allowed if taken else frozenset())

    def units(self, taken: Hunks) -> Iterator[tuple[_Uses, Unit]]:
        done = 0
        for hunk in self.comparison.hunks:
            if hunk.id in taken:
                for unit in self.comparison.port.units[done : hunk.at[1].start]:
                    yield self.after, unit
                for unit in hunk.deleted:
                    yield self.before, unit
                done = hunk.at[1].stop
        for unit in self.comparison.port.units[done:]:
            yield self.after, unit

    def share_names(self, one: Hunk, other: Hunk) -> bool:
        """Whether two hunks have to do with each other: one defines a name that the other defines or uses."""
        return bool(self.defined(one) & self.names(other) or self.defined(other) & self.names(one))

    def names(self, hunk: Hunk) -> frozenset[str]:
        return self.after.loads(hunk.added) | self.before.loads(hunk.deleted) | self.defined(hunk)

    def defined(self, hunk: Hunk) -> frozenset[str]:
        return self.after.bound(hunk.added) | self.before.bound(hunk.deleted)


_BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__spec__", "__builtins__", "__class__"}


class _Uses:
    """The names that the units of one file use and define."""

    def __init__(self, source: Script):
        self.names = Names.of(source)
        self.seen: dict[int, tuple[frozenset[str], frozenset[str]]] = {}

    def of(self, unit: Unit) -> tuple[frozenset[str], frozenset[str]]:
        """What a unit uses, and what it defines; scopes are not told apart."""
        found = self.seen.get(id(unit))
        if found is None:
            loads, bound = _used(unit.node), _bound(unit.node)
            for name in () if isinstance(unit.node, ast.Import | ast.ImportFrom) else self.names.touched(unit):
                if name.startswith(_MAKES_GROUP):
                    bound.add(GROUP)
                elif name.startswith("torch.") and category_of(name) in COMMUNICATION | {WRAPPING}:
                    loads.add(GROUP)
            found = self.seen[id(unit)] = frozenset(loads - bound if GROUP in bound else loads), frozenset(bound)
        return found

    def loads(self, units: Iterable[Unit]) -> frozenset[str]:
        return frozenset(itertools.chain.from_iterable(self.of(unit)[0] for unit in units))

    def bound(self, units: Iterable[Unit]) -> frozenset[str]:
        return frozenset(itertools.chain.from_iterable(self.of(unit)[1] for unit in units))


def _used(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)}


def _bound(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.arg(arg=name):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
            case _:
                parameter = getattr(each, "name", None)  # of a generic function or class, from Python 3.12
                if isinstance(parameter, str):
                    found.add(parameter)
    return found


@dataclass
class Search:
    """Takes the hunks of a port back, as many as its cell can do without.

    A hunk that turns out idle stays out while the others are tried, so that of two hunks of which one is enough only
    one is called idle, and what is left at the end has passed as it is. Uses of a name are tried before its
    definition, so that an import that only idle hunks use is found idle. Where hunks cannot go without each other,
    they are tried together; where none depends on another, there is one run for each hunk.

    Attributes:
        run: runs the port without some hunks.
        pace: measures how much slower the port without `base` is when `without` are taken back as well.
        known: trials there are already; at least that of the port itself.
        told: called with what is settled, as soon as it is.
    """

    comparison: Comparison
    run: Callable[[Hunks], Trial]
    pace: Callable[[Hunks, Hunks], Pace | None]
    known: Mapping[Hunks, Trial] = field(default_factory=dict)
    told: Callable[[Settled], None] = lambda settled: None

    def __post_init__(self) -> None:
        self.trials = dict(self.known)
        self.removed: Hunks = NONE
        self.found: dict[int, Settled] = {}
        self.since: dict[int, Hunks] = {}

    @cached_property
    def needs(self) -> Dependencies:
        return Dependencies(self.comparison)

    def settled(self) -> list[Settled]:
        """What is known of each hunk, in the order of the port."""
        hunks = [hunk.id for hunk in self.comparison.hunks]
        sizes = {hunk: len(self.needs.closure(frozenset({hunk}))) for hunk in hunks}
        waiting = sorted(hunks, key=lambda hunk: (sizes[hunk], -hunk))
        while waiting:
            for hunk in waiting:
                if hunk not in self.removed:
                    self.settle(hunk)
            waiting = [hunk for hunk in hunks if self.worth_another(hunk)]
        return [self.found[hunk] for hunk in hunks]

    def worth_another(self, hunk: int) -> bool:
        """Whether hunks that a required one has to do with were taken back after it was tried."""
        settled = self.found[hunk]
        later = self.removed - self.since.get(hunk, self.removed)
        hunks = self.needs.hunks
        return settled.verdict == "required" and any(self.needs.share_names(hunks[hunk], hunks[g]) for g in later)

    def settle(self, hunk: int) -> None:
        self.since[hunk] = self.removed
        alone = self.removed | {hunk}
        partners = self.needs.closure(alone) - alone
        trial = self.trial(alone)
        kept = frozenset(h for h in partners if h in self.found and self.found[h].verdict != "idle")
        if trial.outcome not in ("pass", "fail"):
            self.tell(Settled(hunk, "unproven", trial))
        elif not partners:
            self.conclude(hunk, NONE, trial)
        elif kept:  # without it, what is needed would not be whole, whether or not the run came to that line
            users = self.needs.partners(alone) & kept
            self.tell(Settled(hunk, "required", trial, needed_by=users or kept))
        else:
            joint = self.trial(alone | partners)
            if joint.outcome == "pass":
                self.conclude(hunk, partners, joint)
            else:
                self.tell(Settled(hunk, "required", trial, needed_by=partners if trial.outcome == "pass" else NONE))

    def conclude(self, hunk: int, partners: Hunks, trial: Trial) -> None:
        """What a run means that took back all that had to go."""
        if trial.outcome == "fail":
            self.tell(Settled(hunk, "required", trial))
            return
        group = partners | {hunk}
        unsettled = trial.settled is False and self.trials[self.removed].settled is True
        pace = None if unsettled else self.pace(self.removed, group)
        slower = unsettled or (pace is not None and is_slower(pace))
        verdict: Literal["performance", "idle"] = "performance" if slower else "idle"
        if verdict == "idle":
            self.removed |= group
        for each in sorted(group):
            self.since[each] = self.removed
            self.tell(Settled(each, verdict, trial, together=group - {each}, pace=pace))

    def trial(self, taken: Hunks) -> Trial:
        if taken not in self.trials:
            self.trials[taken] = self.run(taken)
        return self.trials[taken]

    def tell(self, settled: Settled) -> None:
        self.found[settled.hunk] = settled
        self.told(settled)


ALPHA = 0.01
"""A slowdown counts when chance alone would show one as large in fewer than 1 of 100 comparisons (a port has many
hunks, and every one that passes is compared),"""
EFFECT = 0.05
"""and when it is at least 5 %, as in the comparison of two runs."""


def is_slower(pace: Pace) -> bool:
    """Whether a difference is beyond noise."""
    return pace.slowdown is not None and pace.slowdown >= 1 + EFFECT and pace.p is not None and pace.p < ALPHA
