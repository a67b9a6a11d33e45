"""Accelerators and backends of other packages, found by entry point: a real one is installed and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from matrix import journal
from tests.matrix.harness import DIGITS, Bench, digits, edited

TOYNPU = Path(__file__).parents[2] / "examples" / "toynpu"

DEFINITION = """\
matrix:
  workload: [WORKLOAD]
  backend: [BACKEND]
  accelerator: [toynpu]
  layout: [single]
run: {steps: 4, measure: {processes: 1}}
"""


@pytest.fixture(scope="session")
def toynpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example package was installed; for PYTHONPATH."""
    target = tmp_path_factory.mktemp("toynpu")
    words = ["install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target), str(TOYNPU)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return target


def run(
    folder: Path, toynpu: Path, workload: str = "digits", backend: str = "jax", **variables: str
) -> tuple[int, str]:
    text = DEFINITION.replace("WORKLOAD", workload).replace("BACKEND", backend)
    (folder / "mine.yaml").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "matrix.cli", "run", "mine.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(toynpu), **variables},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "node").touch()
    return {"TOYNPU_NODE": str(tmp_path / "node")}


def attempts(folder: Path) -> list[journal.AttemptRecord]:
    return journal.read(next(journal.find([folder / "results"]))).attempts


def test_a_cell_runs_on_an_accelerator_of_another_package(tmp_path: Path, toynpu: Path, node: dict[str, str]) -> None:
    code, said = run(tmp_path, toynpu, **node)
    assert code == 0, said
    assert "digits/jax/toynpu/single  as-is" in said
    first = attempts(tmp_path)[0]
    assert (first.devices.used, first.devices.expected) == (1, 1)


def test_a_script_that_ignores_it_is_on_the_wrong_device(
    tmp_path: Path, bench: Bench, toynpu: Path, node: dict[str, str]
) -> None:
    ignoring = edited(
        DIGITS / "jax" / "train.py", ("import jax\n", "import jax\n\njax.config.update('jax_platforms', 'cpu')\n")
    )
    digits(bench, jax_train=ignoring)
    code, said = run(tmp_path, toynpu, "edited", **node)
    assert code == 1, said
    failure = attempts(tmp_path)[0].failure
    assert failure is not None
    assert failure.cause == "wrong-device"
    assert failure.message == "the cell's device is toynpu, but the parameters were held on cpu:0 100%"


def test_without_its_device_node_nothing_is_executed(tmp_path: Path, toynpu: Path) -> None:
    code, said = run(tmp_path, toynpu, TOYNPU_NODE="/nonexistent")
    assert code == 3, said
    assert "unproven: no ToyNPU: no device node /nonexistent" in said


def test_a_backend_of_another_package_runs_its_way(tmp_path: Path, toynpu: Path, node: dict[str, str]) -> None:
    code, said = run(tmp_path, toynpu, backend="jax-nojit", **node)
    assert code == 0, said
    assert attempts(tmp_path)[0].environment["variables"]["JAX_DISABLE_JIT"] == "1"


def test_an_entry_point_that_does_not_load_is_named(tmp_path: Path, toynpu: Path) -> None:
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text("[portmatrix.accelerators]\nnpu = no_such_module:ACCELERATOR\n")
    code, said = run(tmp_path, tmp_path)
    assert code == 2, said
    assert said == (
        "portmatrix: entry point 'npu = no_such_module:ACCELERATOR' of group portmatrix.accelerators does not load: "
        "ModuleNotFoundError: No module named 'no_such_module'\n"
    )
