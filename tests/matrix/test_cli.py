"""The command: what it prints and refuses, without running a cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from matrix import definition
from matrix.cli import main


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_plan_lists_every_cell_and_says_what_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cpu", "--select", "backend=jax,workload=digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:9:2]] == [
        f"digits/jax/{chip}/single" for chip in ("cpu", "cuda", "rocm", "tpu")
    ]
    assert lines[1].split() == ["digits/jax/cpu/single", "jax/train.py", "runs", "here"]
    assert lines[3].split(maxsplit=2)[2].startswith("unproven: no NVIDIA GPU")


def test_the_plan_as_json_has_a_row_for_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smoke", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["cell"], row["unavailable"]) for row in rows] == [
        ("digits/jax/cpu/single", None),
        ("digits/torch/cpu/single", None),
    ]


def test_the_plan_for_github_is_one_line_whose_selections_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cpu", "--format", "github"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    jobs = json.loads(out)["include"]
    for job in jobs:
        assert main(["plan", "cpu", "--format", "github", "--select", job["select"]]) == 0
    assert len(jobs) == 12  # 3 backends x 4 accelerators


def test_the_schema_is_the_one_that_editors_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == definition.json_schema()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "cpuu"], "did you mean 'cpu'?"),
        (["plan", "/nonexistent/mine.yaml"], "/nonexistent/mine.yaml"),
        (["run", "cpu", "--select", "backend=jaxx"], "--select: no cell has backend 'jaxx': did you mean 'jax'?"),
        (["run", "cpu", "--select", "backned=jax"], "unknown axis 'backned': did you mean 'backend'?"),
        (["run", "cpu", "-n", "0"], "-n takes a number of cells at a time or 'auto', got '0'"),
        (["run", "cpu", "--budget", "-1"], "--budget takes a positive number of minutes, got -1"),
        (["run", "cpu", "--live"], "--live shows one cell"),
        (["run", "smoke", "--python", "jax"], "--python takes BACKEND=PATH, got 'jax'"),
        (["run", "smoke", "--python", "jx=/usr/bin/python3"], "unknown backend 'jx': did you mean 'jax'?"),
        (["run", "smoke", "--python", "jax=/nonexistent"], "'/nonexistent' is no interpreter that can be executed"),
        (["report", "/nonexistent", "-o", "out"], "/nonexistent"),
        (["compare", "/nonexistent", "/nonexistent"], "/nonexistent"),
    ],
)
def test_a_mistake_is_told_in_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *words)
    assert said.startswith("portmatrix: ")
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_planning_imports_no_framework_and_no_test_runner() -> None:
    code = (
        "import sys; from matrix.cli import main; main(['plan', 'smoke']); "
        "print(sorted({'torch', 'jax', 'pytest', 'scipy', 'jinja2', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"
