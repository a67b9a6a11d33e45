"""The wheel: everything needed to plan, run and report is in it, wherever it is started."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from matrix.backends import INSIDE

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run([*PIP, *words], check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_definitions_workloads_and_pages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (
        "matrix/definitions/cpu.yaml",
        "matrix/definitions/schema.json",
        "matrix/evidence/gpus/h100.txtpb",
        "matrix/inside/worker.py",
        "matrix/launch/supervisor.py",
        "matrix/pytest.ini",
        "workloads/digits/workload.yaml",
        "workloads/digits/reference.csv",
        "workloads/digits/torch/train.py",
        "workloads/digits-cuda/workload.yaml",
        "reports/html/style.css",
    ):
        assert file in names
    assert any(name.startswith("workloads/digits/data/") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"matrix", "reports", "workloads"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_it_runs_beside_folders_of_the_users_own_that_have_our_names(wheel: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "target", tmp_path / "work"
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    for name in ("matrix", "reports", "workloads", "cpu", "smoke"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise SystemExit('the user's own')")
    (work / "conftest.py").write_text("raise SystemExit('the user's own')")
    (work / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    ended = subprocess.run(
        [str(target / "bin" / "portmatrix"), "run", "smoke", "-n", "2", "--report", "page"],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(target), "PYTEST_ADDOPTS": "--no-such-option"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 cells: 2 as-is; 2 executed; all as expected" in ended.stdout
    page = (work / "page" / "index.html").read_text()
    assert str(target / "workloads" / "digits") in page  # the command by hand: the wheel's own scripts were run


def test_versions_are_the_same_wherever_they_stand() -> None:
    """tox.ini has them; the README's commands can be pasted, and the files that use private names say for which."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    pinned = {name: re.findall(r"\d[\d.]*", value)[0] for name, value in tox["versions"].items()}
    for name, version in re.findall(r"\b(jax|torch|torch_xla)==([\d.]+)", (ROOT / "README.md").read_text()):
        assert version in {pinned[name], pinned["torch_xla"] if name == "torch" else None}, f"{name}=={version}"
    assert pinned["jax"] in runpy.run_path(str(INSIDE / "chips_jax.py"))["VERIFIED"]
    assert pinned["torch_xla"] in runpy.run_path(str(INSIDE / "capture_xla.py"))["VERIFIED"]
    assert pinned["torch"].rpartition(".")[0] in runpy.run_path(str(INSIDE / "fake_cuda.py"))["TRIED"]
