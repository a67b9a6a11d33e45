"""Portability metrics against values worked out by hand from the formulas; what the exports hold."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from reports import p3
from reports.merge import merge
from reports.portability import (
    application_efficiency,
    convergence,
    divergence,
    performance_portability,
    portability,
    weave,
)
from tests.reports.records import MadeUpRun, attempt, failure, planned, processes

BASELINE = "import torch\nmodel = Model()\nbatch = load()\nprint(batch)\n"
PORT = "import torch\nimport torch.distributed as dist\nmodel = Model()\nbatch = load()[rank]\nprint(batch)\n"


def test_efficiency_is_relative_to_the_best_application() -> None:
    # The best is 200: 100/200, 200/200; one does not run there, one was not measured.
    assert application_efficiency({"a": 100.0, "b": 200.0, "c": 0.0, "d": None}) == {
        "a": 0.5,
        "b": 1.0,
        "c": 0.0,
        "d": None,
    }
    assert application_efficiency({"a": 0.0, "b": None}) == {"a": 0.0, "b": None}


@pytest.mark.parametrize(
    ("efficiencies", "pp"),
    [
        ([0.5, 1.0], 2 / 3),  # 2 / (1/0.5 + 1/1) = 2 / 3
        ([0.25, 0.5, 1.0], 3 / 7),  # 3 / (4 + 2 + 1)
        ([0.4], 0.4),  # one platform: 1 / (1/0.4)
        ([1.0, 1.0, 1.0], 1.0),
        ([1.0, 0.0], 0.0),  # a platform on which it does not run
        ([1.0, None], None),  # unproven
        ([0.0, None], 0.0),  # whatever the other turns out to be, it is 0
        ([], None),
    ],
)
def test_performance_portability_is_the_harmonic_mean(efficiencies: list[float | None], pp: float | None) -> None:
    found = performance_portability(efficiencies)
    assert found == pp if pp is None else found == pytest.approx(pp)


@pytest.mark.parametrize(
    ("lines", "cd"),
    [
        ([{1, 2}, {1, 2}, {1, 2}], 0.0),  # identical
        ([{1, 2}, {3, 4}], 1.0),  # disjoint: 1 - 0/4
        ([{1, 2, 3}], 0.0),  # one platform: no pair
        ([{1, 2, 3}, {2, 3, 4}], 0.5),  # 1 - 2/4
        # Pairs: 1 - 1/3, 1 - 2/2, 1 - 1/3; their mean is 4/9.
        ([{1, 2}, {2, 3}, {1, 2}], 4 / 9),
        ([set(), set()], 0.0),
    ],
)
def test_divergence_is_the_mean_jaccard_distance(lines: list[set[int]], cd: float) -> None:
    assert divergence(lines) == pytest.approx(cd)
    assert convergence(lines) == pytest.approx(1 - cd)


def test_lines_that_sources_share_stand_once() -> None:
    found = weave({"train.py": BASELINE, "ddp.py": PORT})
    assert found.lines == (
        "import torch",
        "import torch.distributed as dist",
        "model = Model()",
        "batch = load()",
        "batch = load()[rank]",
        "print(batch)",
    )
    assert found.used == {"train.py": {1, 3, 4, 6}, "ddp.py": {1, 2, 3, 5, 6}}


def test_comments_and_formatting_are_no_divergence_and_what_does_not_parse_is_compared_as_it_is_written() -> None:
    same = weave({"a": "x = f(1,2) # why\n", "b": '"""Doc."""\nx = f(\n    1, 2)\n'})
    assert same.used == {"a": {1}, "b": {1}}
    other = weave({"a": "x = 1\ny = 2\n", "b": "x = 1\ny = (\n"})
    assert other.used == {"a": {1, 2}, "b": {1, 3}}


def run() -> MadeUpRun:
    """jax and torch on two platforms: 300 and 100 tokens/s on cpu, 1000 and 2000 on cuda, where torch is a port."""
    made = MadeUpRun(sources={"gpt/torch/train.py": BASELINE, "gpt/torch/ddp.py": PORT, "gpt/jax/train.py": BASELINE})
    for accelerator, jax, torch in (("cpu", 300.0, 100.0), ("cuda", 1000.0, 2000.0)):
        cell = planned("gpt", "jax", accelerator)
        made.add(cell, attempt(cell), *processes(cell, [jax]))
        cell = planned("gpt", "torch", accelerator)
        role = "baseline" if accelerator == "cpu" else "port"
        before = [attempt(cell, "fail", failure=failure("device-mismatch", "no"))] if role == "port" else []
        made.add(cell, *before, attempt(cell, role=role), *processes(cell, [torch], role=role))
    return made


def test_portability_of_each_application_from_its_rows() -> None:
    jax, torch = portability(merge([run().journal()]))
    assert (jax.problem, jax.application, jax.platforms) == ("gpt", "jax", ("cpu/single", "cuda/single"))
    # jax: 300/300 and 1000/2000, so PP = 2 / (1 + 2); one source, so no divergence.
    assert [point.efficiency for point in jax.points] == [1.0, 0.5]
    assert jax.pp == pytest.approx(2 / 3)
    assert (jax.divergence, jax.convergence) == (0.0, 1.0)
    # torch: 100/300 and 2000/2000, so PP = 2 / (3 + 1); of 6 lines, 3 are shared: CD = 1 - 3/6.
    assert torch.pp == pytest.approx(0.5)
    assert torch.divergence == pytest.approx(0.5)
    assert [(point.state, point.source) for point in torch.points] == [
        ("passed", "torch/train.py"),
        ("passed", "torch/ddp.py"),
    ]


def test_the_charts_have_their_numbers() -> None:
    found = portability(merge([run().journal()]))
    assert [(each.application, each.convergence, each.pp) for each in found] == [
        ("jax", 1.0, pytest.approx(2 / 3)),
        ("torch", pytest.approx(0.5), pytest.approx(0.5)),
    ]
    # Best platform first: PP over it alone, then over both.
    assert found[1].cascade == [
        ("cuda/single", 1.0, pytest.approx(1.0)),
        ("cpu/single", pytest.approx(1 / 3), pytest.approx(0.5)),
    ]


def test_a_platform_that_fails_makes_it_zero_and_one_that_nobody_saw_undefined() -> None:
    made = run()
    broken = planned("gpt", "torch", "rocm")
    made.add(broken, attempt(broken, "fail", failure=failure("crash", "SIGSEGV")))
    absent = planned("gpt", "jax", "rocm")
    made.add(absent, attempt(absent, "unavailable", evidence="none", reason="no AMD GPU"))
    jax, torch = portability(merge([made.journal()]))
    assert (jax.pp, torch.pp) == (None, 0.0)
    assert [point.state for point in (jax.points[2], torch.points[2])] == ["unproven", "failed"]
    assert [each.application for each in portability(merge([made.journal()]), ["cpu/single"])] == ["jax", "torch"]
    # Over a stated set that leaves it out, both are defined again.
    stated = portability(merge([made.journal()]), ["cpu/single", "cuda/single"])
    assert [each.pp for each in stated] == [pytest.approx(2 / 3), pytest.approx(0.5)]
    # Over a platform that no cell is planned for, nothing is known.
    assert [each.pp for each in portability(merge([made.journal()]), ["tpu/single"])] == [None, None]


def test_devices_that_are_one_piece_of_hardware_are_not_compared() -> None:
    made = MadeUpRun()
    cell = planned("gpt", "torch", "cpu", "dp2")
    made.add(cell, attempt(cell, role="port"), *processes(cell, [50.0], role="port", comparable=False))
    (found,) = portability(merge([made.journal()]))
    assert (found.points[0].state, found.points[0].fom, found.pp) == ("passed", None, None)


def test_the_export_has_what_the_p3_analysis_library_reads(tmp_path: Path) -> None:
    p3.write(portability(merge([run().journal()])), tmp_path)
    with (tmp_path / "efficiency.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["problem"], row["application"], row["platform"], row["fom"]) for row in rows] == [
        ("gpt", "jax", "cpu/single", "300.0"),
        ("gpt", "jax", "cuda/single", "1000.0"),
        ("gpt", "torch", "cpu/single", "100.0"),
        ("gpt", "torch", "cuda/single", "2000.0"),
    ]
    with (tmp_path / "coverage.csv").open(newline="") as file:
        coverages = {row["coverage_key"]: json.loads(row["coverage"]) for row in csv.DictReader(file)}
    baseline, port = coverages[rows[2]["coverage_key"]], coverages[rows[3]["coverage_key"]]
    assert [entry.keys() for entry in baseline] == [{"file", "id", "used_lines", "unused_lines"}]
    assert (baseline[0]["file"], baseline[0]["id"]) == (port[0]["file"], port[0]["id"])
    assert (baseline[0]["used_lines"], baseline[0]["unused_lines"]) == ([1, 3, 4, 6], [2, 5])
    assert port[0]["used_lines"] == [1, 2, 3, 5, 6]
    code = (tmp_path / "code" / "gpt-torch.py").read_text().splitlines()
    assert code[1] == "import torch.distributed as dist"


def test_files_of_applications_whose_names_are_alike_are_told_apart(tmp_path: Path) -> None:
    made = MadeUpRun()
    for workload in ("a b", "a*b", "x" * 300):
        cell = planned(workload, "torch")
        made.add(cell, attempt(cell), *processes(cell, [50.0]))
    p3.write(portability(merge([made.journal()])), tmp_path)
    names = sorted(path.name for path in (tmp_path / "code").glob("*.py"))
    assert [name.partition("-torch")[0][:3] for name in names] == ["a-b", "a-b", "xxx"]
    assert len(set(names)) == 3
