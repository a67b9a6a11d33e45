"""The search for hunks that can go, over small scripts that are really executed, here in this process."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

import pytest

from matrix import changes
from matrix.changes import script
from matrix.changes.removal import NONE, Dependencies, Hunks, Search, Settled, is_slower
from matrix.journal import Pace, Trial


@dataclass
class Lab:
    """A baseline and a port that pass when they leave `result == expected`."""

    baseline: str
    port: str
    expected: object = 0
    slow: dict[int, float] = field(default_factory=dict)
    """By hunk, how much slower the port is without it."""
    ran: list[Hunks] = field(default_factory=list)
    measured: list[Hunks] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comparison = changes.compare(textwrap.dedent(self.baseline), textwrap.dedent(self.port))

    def run(self, taken: Hunks) -> Trial:
        self.ran.append(taken)
        space: dict[str, object] = {}
        try:
            exec(compile(changes.without(self.comparison, taken), "port.py", "exec"), space)
        except Exception as error:
            return Trial(without=sorted(taken), outcome="fail", reason=f"{type(error).__name__}: {error}")
        passed = space.get("result") == self.expected
        return Trial(without=sorted(taken), outcome="pass" if passed else "fail", reason=f"{space.get('result')}")

    def pace(self, base: Hunks, taken: Hunks) -> Pace:
        self.measured.append(taken)
        slowdown = max(self.slow.get(hunk, 1.0) for hunk in taken)
        p = 0.004 if slowdown > 1 else 0.5  # five processes against five, all of one side slower: 1/252
        return Pace(base=sorted(base), without=sorted(taken), slowdown=slowdown, p=p, processes=5)

    def search(self) -> tuple[Search, dict[int, Settled]]:
        everything = frozenset(hunk.id for hunk in self.comparison.hunks)
        known = {
            NONE: Trial(without=[], outcome="pass"),
            everything: Trial(without=sorted(everything), outcome="fail"),
        }
        search = Search(self.comparison, self.run, self.pace, known)
        return search, {settled.hunk: settled for settled in search.settled()}

    def verdicts(self) -> list[str]:
        _, found = self.search()
        return [found[hunk.id].verdict for hunk in self.comparison.hunks]


def independent(n: int) -> Lab:
    """Each hunk adds 1 to what the cell checks."""
    baseline = "total = 0\n" + "".join(f"keep{i} = 1\n" for i in range(n)) + "result = total\n"
    port = "total = 0\n" + "".join(f"keep{i} = 1\ntotal = total + 1\n" for i in range(n)) + "result = total\n"
    return Lab(baseline, port, n)


def test_eight_independent_hunks_take_eight_runs_besides_the_ports_own() -> None:
    lab = independent(8)
    assert len(lab.comparison.hunks) == 8
    assert lab.verdicts() == ["required"] * 8
    assert len(lab.ran) == 8


def test_idle_hunks_that_depend_on_nothing_take_no_more_runs() -> None:
    lab = Lab(
        "a = 0\nb = 0\nc = 0\nd = 0\nresult = a + b + c + d\n",
        "a = 1\nw = 5\nb = 0\nc = 1\nx = 5\nd = 0\ny = 5\nresult = a + b + c + d\n",
        2,
    )
    assert lab.verdicts() == ["required", "required", "idle"]  # `w` and `x` share a hunk with what is required
    assert len(lab.ran) == 3


@pytest.mark.parametrize(
    ("whole", "without", "verdict"),
    [(True, False, "performance"), (True, True, "idle"), (False, False, "idle"), (None, None, "idle")],
)
def test_a_hunk_without_which_the_port_never_stops_compiling_is_for_performance(
    whole: bool | None, without: bool | None, verdict: str
) -> None:
    """Whether or not speed is measured: a step that always compiles never comes to be measured."""
    search = Search(
        changes.compare("a = 0\n", "a = 0\nsync()\n"),
        run=lambda taken: Trial(without=sorted(taken), outcome="pass", settled=without),
        pace=lambda base, taken: None,
        known={NONE: Trial(without=[], outcome="pass", settled=whole)},
    )
    assert [each.verdict for each in search.settled()] == [verdict]


def test_an_import_that_only_idle_code_uses_goes_with_it() -> None:
    lab = Lab(
        "k = 0\nx = 1\nk = 1\nresult = 1\n",
        "import math\nk = 0\nx = math.sqrt(4)\nk = 1\nresult = 0\n",
    )
    search, found = lab.search()
    assert [found[i].verdict for i in (1, 2, 3)] == ["idle", "idle", "required"]
    assert search.removed == {1, 2}


def test_an_import_that_required_code_uses_is_required_even_if_the_run_does_not_come_to_that_line() -> None:
    lab = Lab(
        "k = 0\nresult = 1\nk = 1\n",
        "import os\nk = 0\nresult = 0\nif result:\n    os.abort()\nk = 1\n",
    )
    _, found = lab.search()
    assert found[1].verdict == found[2].verdict == "required"
    assert (found[1].trial or Trial(without=[], outcome="error")).outcome == "pass"
    assert found[1].needed_by == {2}


def test_hunks_that_need_each_other_are_found_idle_together() -> None:
    """A renaming: with any one of its places taken back, a name is missing."""
    lab = Lab(
        "net = 1\nkeep = 1\ny = net\nkeep = 2\nresult = 1\n",
        "model = 1\nkeep = 1\ny = model\nkeep = 2\nresult = 0\n",
    )
    search, found = lab.search()
    assert [found[i].verdict for i in (1, 2, 3)] == ["idle", "idle", "required"]
    assert (found[1].together, found[2].together) == ({2}, {1})
    assert search.removed == {1, 2}


def test_of_two_hunks_of_which_one_is_enough_one_is_required() -> None:
    lab = Lab("result = 1\nkeep = 1\n", "result = 1\nresult = 0\nkeep = 1\nresult = 0\n")
    assert sorted(lab.verdicts()) == ["idle", "required"]


def test_a_hunk_without_which_nothing_parses_is_taken_back_with_its_neighbour() -> None:
    needs = Dependencies(changes.compare("with a:\n    b\nc\n", "for x in a:\n    b\nelse:\n    d\nc\n"))
    assert needs.closure(frozenset({1})) == {1, 2}


def test_what_makes_the_process_group_must_not_go_before_what_uses_it() -> None:
    before = "import torch.distributed as dist\na = 1\nb = 2\n"
    after = f"{before[:-12]}dist.init_process_group()\na = 1\ndist.barrier()\nb = 2\ndist.destroy_process_group()\n"
    needs = Dependencies(changes.compare(before, after))
    assert needs.closure(frozenset({1})) == {1, 2, 3}
    assert needs.closure(frozenset({2})) == {2}


def test_a_hunk_that_only_makes_it_faster_stays_and_only_what_passes_is_measured() -> None:
    lab = Lab("a = 1\nk = 0\nresult = 1\nk = 1\nb = 1\n", "a = 2\nk = 0\nresult = 0\nk = 1\nb = 2\n", slow={1: 1.4})
    search, found = lab.search()
    assert [found[i].verdict for i in (1, 2, 3)] == ["performance", "required", "idle"]
    assert search.removed == {3}
    assert lab.measured == [{3}, {1}]


@pytest.mark.parametrize(
    ("slowdown", "p", "slower"),
    [(1.2, 0.004, True), (1.2, 0.2, False), (1.03, 0.004, False), (None, None, False), (0.8, 0.9, False)],
)
def test_slower_is_beyond_noise_and_worth_a_persons_time(slowdown: float | None, p: float | None, slower: bool) -> None:
    assert is_slower(Pace(base=[], without=[1], slowdown=slowdown, p=p)) is slower


def test_a_port_that_does_the_same_as_its_baseline_has_no_hunks() -> None:
    lab = Lab("result = 0\n", "# the same\nresult = 0\n")
    assert lab.verdicts() == []
    assert lab.ran == []


def test_a_run_that_says_nothing_leaves_its_hunk_unproven() -> None:
    lab = independent(2)
    search = Search(
        lab.comparison,
        run=lambda taken: Trial(without=sorted(taken), outcome="error", reason="disk full"),
        pace=lab.pace,
        known={NONE: Trial(without=[], outcome="pass")},
    )
    assert [settled.verdict for settled in search.settled()] == ["unproven", "unproven"]
    assert search.removed == NONE


def test_what_is_left_has_passed_as_it_is() -> None:
    lab = Lab("import sys\nresult = 1\nx = 1\ny = 1\n", "import sys, os\nresult = 0\nx = os\ny = 2\n", slow={})
    search, _ = lab.search()
    assert search.trials[search.removed].outcome == "pass"
    assert script.parses(changes.without(lab.comparison, search.removed))
