"""make_reference.py, with scripts of a few lines in place of training."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "workloads" / "make_reference.py"
DESCRIPTION = """
implementations:
  torch:
    baseline: {file: torch/train.py}
  jax:
    baseline: {file: jax/train.py}
"""
SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--seed", type=int)
parser.add_argument("--log-every")
parser.add_argument("--dtype")
args = parser.parse_args()
noise = {"float64": OFF, "float32": 1e-6, "bfloat16": 1e-2}.get(args.dtype, 0)
for step in range(1, args.steps + 1):
    print(f"step={step} loss={(1 + noise) / step:.12g} examples=96")
print(f"eval={(1 + noise) * 2:.12g}")
"""


@pytest.fixture
def workload(tmp_path):
    for package in ("torch", "jax", "equinox", "optax"):
        pytest.importorskip(package)  # their versions are noted
    (tmp_path / "workload.yaml").write_text(DESCRIPTION)
    for framework, off in (("torch", "0"), ("jax", "1e-10")):
        (tmp_path / framework).mkdir()
        (tmp_path / framework / "train.py").write_text(SCRIPT.replace("OFF", off))
    return tmp_path


def make(workload, *flags):
    command = [sys.executable, PROGRAM, workload, "--steps=3", "--seeds=2", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_reference_is_the_float64_trajectory_as_printed(workload):
    assert make(workload).returncode == 0
    assert (workload / "reference.csv").read_text() == "step,loss\n1,1\n2,0.5\n3,0.333333333333\neval,2\n"


def test_runs_that_end_earlier_have_rows_for_their_evaluation(workload):
    assert make(workload, "--evaluate-after", "2").returncode == 0
    assert (workload / "reference.csv").read_text().endswith("3,0.333333333333\neval@2,2\neval,2\n")


def test_evaluations_of_earlier_ends_that_disagree_leave_the_old_reference(workload):
    (workload / "reference.csv").write_text("step,loss\n1,1\n")
    late = SCRIPT.replace("OFF", "0").replace("(1 + noise) * 2", "2 + (args.steps < 3)")
    (workload / "jax" / "train.py").write_text(late)
    process = make(workload, "--evaluate-after", "2")
    assert process.returncode == 1
    assert "jax: eval after 2 steps is 3, expected 2. Nothing written." in process.stderr
    assert (workload / "reference.csv").read_text() == "step,loss\n1,1\n"


def test_deviations_are_the_largest_over_seeds_and_steps(workload):
    process = make(workload)
    with (workload / "tolerance.csv").open() as file:
        rows = {(row["framework"], row["precision"]): float(row["deviation"]) for row in csv.DictReader(file)}
    assert rows == pytest.approx(
        {
            ("jax", "float64, to torch"): 1e-10,
            ("torch", "ieee-f32"): 1e-6,
            ("torch", "bf16"): 1e-2,
            ("jax", "ieee-f32"): 1e-6,
            ("jax", "bf16"): 1e-2,
        },
        rel=0.02,
    )
    assert "bf16: at most 1.0e-02; suggested tolerance 3e-02" in process.stdout


def test_frameworks_that_disagree_in_float64_are_refused_and_nothing_is_written(workload):
    (workload / "jax" / "train.py").write_text(SCRIPT.replace("OFF", "1e-8"))
    process = make(workload)
    assert process.returncode == 1
    assert "seed 0: jax is 1.0e-08 from torch at step" in process.stderr
    assert not (workload / "reference.csv").exists()
    assert not (workload / "tolerance.csv").exists()


def test_a_baseline_that_cannot_run_here_yields_to_a_port_for_one_device(workload):
    (workload / "workload.yaml").write_text(
        DESCRIPTION.replace("train.py}", "train.py}\n    ports: [{file: torch/port.py, for: {strategy: single}}]", 1)
    )
    (workload / "torch" / "train.py").rename(workload / "torch" / "port.py")
    (workload / "torch" / "train.py").write_text("raise RuntimeError('no CUDA device')")
    process = make(workload)
    assert process.returncode == 0
    assert "torch/train.py: does not run here (RuntimeError: no CUDA device)" in process.stderr


def test_measuring_only_leaves_the_reference_alone(workload):
    (workload / "reference.csv").write_text("step,loss\n1,1\n")
    assert make(workload, "--only-measure").returncode == 0
    assert (workload / "reference.csv").read_text() == "step,loss\n1,1\n"
