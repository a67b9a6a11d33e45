"""The section on required changes: what it shows of ports, and of portability what is defined."""

from __future__ import annotations

import pytest

from reports.html import changes
from reports.html.changes import Folded, Heading, letters, section
from reports.merge import Evidence, merge
from reports.portability import portability
from reports.required import Line

from ..records import MadeUpRun, attempt, failure, planned, processes

SHARED = "".join(f"line{number} = {number}\n" for number in range(20))
BASELINE = f"import torch\n{SHARED}model = Model()\n"
PORT = f"import torch\nimport torch.distributed as dist\n{SHARED}model = Model()\n"


def evidence(tpu: str = "") -> Evidence:
    """jax runs as it is on both chips; torch needs a port on cuda, and on a tpu is what `tpu` says."""
    sources = {"gpt/torch/train.py": BASELINE, "gpt/torch/ddp.py": PORT, "gpt/jax/train.py": "import jax\n"}
    run = MadeUpRun(sources=sources)
    no = failure("device-mismatch", "no")
    for accelerator, rate in (("cpu", 300.0), ("cuda", 1000.0)):
        cell = planned("gpt", "jax", accelerator)
        run.add(cell, attempt(cell), *processes(cell, [rate]))
    cpu, cuda = planned("gpt", "torch", "cpu"), planned("gpt", "torch", "cuda")
    run.add(cpu, attempt(cpu), *processes(cpu, [100.0]))
    run.add(
        cuda, attempt(cuda, "fail", failure=no), attempt(cuda, role="port"), *processes(cuda, [2000.0], role="port")
    )
    if tpu:
        for backend in ("jax", "torch"):
            cell = planned("gpt", backend, "tpu")
            reached = attempt(cell, "fail", failure=no) if tpu == "fails" and backend == "torch" else None
            run.add(cell, reached or attempt(cell, "unavailable", evidence="none", reason="no TPU"))
    return merge([run.journal()])


def test_portability_is_told_over_what_was_measured_and_over_the_plan() -> None:
    found = evidence(tpu="absent")
    jax, torch = section(found, portability(found)).portable
    assert (jax.mark, torch.mark) == ("A", "B")
    assert jax.measured.platforms == ("cpu/single", "cuda/single")
    # 300/300 and 1000/2000: 2 / (1 + 2); 100/300 and 2000/2000: 2 / (3 + 1). Of 23 lines, 22 are shared.
    assert (jax.measured.pp, torch.measured.pp) == (pytest.approx(2 / 3), pytest.approx(0.5))
    assert (jax.measured.convergence, torch.measured.convergence) == (1.0, pytest.approx(22 / 23))
    assert (jax.why, jax.planned.pp, jax.planned_why) == ("", None, "tpu/single unproven")


def test_what_fails_is_zero_and_what_is_not_known_has_no_point() -> None:
    found = evidence(tpu="fails")
    jax, torch = section(found, portability(found)).portable
    assert (jax.planned.pp, torch.planned.pp) == (None, 0.0)
    assert changes.efficiency(torch.planned.points[2]) == "fails"
    assert changes.efficiency(jax.planned.points[2]) == "unproven"
    run = MadeUpRun()
    cell = planned("gpt", "torch", "cpu", "dp2")
    run.add(cell, attempt(cell), *processes(cell, [50.0], comparable=False))
    unknown = merge([run.journal()])
    made = section(unknown, portability(unknown))
    (only,) = made.portable
    assert (only.mark, only.why, only.planned_why) == (
        "",
        "no platform was comparably measured",
        "cpu/dp2 not comparably measured",
    )
    assert changes.unknown_convergence(only.measured) == "no platform was comparably measured"
    assert changes.unknown_convergence(only.planned) == "a script's text is not known"
    assert (made.navigation, made.cascades) == ("", [])


def test_equal_lines_are_folded_and_each_hunk_has_a_heading() -> None:
    found = evidence()
    (view,) = section(found, portability(found)).views
    kinds = [line.count if isinstance(line, Folded) else line.kind for line in view.lines]
    assert kinds == ["line", "heading", "line", "line", "line", "line", 18]
    heading, new = view.lines[1:3]
    assert isinstance(heading, Heading)
    assert isinstance(new, Line)
    assert (heading.hunk, heading.categories, heading.marks) == (1, "imports", [])
    assert (new.old, new.new) == (None, (2, "import torch.distributed as dist"))
    assert view.verdicts == ""


def test_bars_are_relative_to_the_most_lines_of_a_category() -> None:
    found = evidence()
    made = section(found, portability(found))
    assert (made.categories, made.unknown) == (["imports"], 0)
    ((backend, target, total, bars),) = made.bars
    assert (backend, target, total, [(bar.lines, bar.share) for bar in bars]) == (
        "torch",
        "cuda/single",
        1,
        [(1, 100.0)],
    )


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST", 1)
    found = evidence()
    made = section(found, portability(found))
    assert len(made.portable) == 1
    assert made.left_out["portable"] == 1


def test_points_are_named_by_letters() -> None:
    assert [letters(number) for number in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
