"""A plan is listed for people and for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrix.definition import load
from matrix.listing import as_github, as_json, as_table
from matrix.plan import Plan, plan

DEFINITION = """\
matrix:
  workload: [toy]
  backend: [jax, torch]
  accelerator: [cpu, cuda]
  layout: [single, dp2]
layouts:
  dp2: {devices: 2, strategy: data}
run: {steps: 7}
"""
TOY = """\
about: a toy
unit: tokens
implementations:
  torch:
    baseline: {file: train.py, written_for: cuda}
    ports:
      - {file: portable.py, for: {strategy: single}}
      - {file: ddp.py, launch: torchrun, for: {strategy: data}}
"""


@pytest.fixture
def made(tmp_path: Path) -> Plan:
    toy = tmp_path / "workloads" / "toy"
    toy.mkdir(parents=True)
    for name in ("train.py", "portable.py", "ddp.py"):
        (toy / name).write_text("")
    (toy / "workload.yaml").write_text(TOY)
    (tmp_path / "mine.yaml").write_text(DEFINITION)
    return plan(load(tmp_path / "mine.yaml"))


def test_as_json_a_cell_says_what_it_would_run(made: Plan) -> None:
    row = as_json(made)[5]
    run = row.pop("run")
    assert (run["steps"], run["measure"]["processes"]) == (7, 3)
    assert row == {
        "cell": "toy/torch/cpu/dp2",
        "axes": {"workload": "toy", "backend": "torch", "accelerator": "cpu", "layout": "dp2"},
        "layout": {"name": "dp2", "nodes": 1, "devices": 2, "strategy": "data"},
        "unit": "tokens",
        "written_for": "cuda",
        "required": False,
        "implementation": "torch",
        "baseline": "train.py",
        "ports": ["ddp.py"],
    }


def test_for_github_there_is_a_job_for_each_backend_and_accelerator_whose_selections_are_the_whole_plan(
    made: Plan,
) -> None:
    chosen = made.select("backend=torch|jax,layout=single|dp2")
    jobs = as_github(chosen)["include"]
    assert jobs[0] == {
        "backend": "jax",
        "accelerator": "cpu",
        "select": "backend=jax,layout=single|dp2,accelerator=cpu",
        "cells": 2,
    }
    together = [cell.id for job in jobs for cell in made.select(job["select"]).cells]
    assert sorted(together) == sorted(cell.id for cell in chosen.cells)


def test_as_a_table_a_cell_is_a_line_with_its_note(made: Plan) -> None:
    chosen = made.select("layout=single,accelerator=cpu")
    assert as_table(chosen, {"toy/jax/cpu/single": "no implementation"}) == (
        "CELL                  SOURCES                NOTE\n"
        "toy/jax/cpu/single    -                      no implementation\n"
        "toy/torch/cpu/single  train.py, portable.py\n"
    )
