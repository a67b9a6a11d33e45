"""`portmatrix changes`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from matrix.changes import text
from matrix.cli import main

BASELINE = "import torch\n\nmodel = Model()\nprint(1)\n"
PORT = (
    "import torch\nimport torch.distributed as dist\n\nmodel = Model()\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)\nif dist.get_rank() == 0:\n    print(1)\n"
)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(BASELINE)
    (tmp_path / "ddp.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_files_are_compared_without_a_workload(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["changes", "train.py", "ddp.py"]) == 0
    assert capsys.readouterr().out == (
        "train.py -> ddp.py: +4 -1 lines in 2 hunks, 2 of communication\n"
        "  imports                                  1\n"
        "  process group and launch                 3\n"
        "  model wrapping and sharding annotations  1\n"
        "\n"
        "hunk 1: after line 1 -> line 2\n"
        "  + import torch.distributed as dist  [imports, communication]\n"
        "\n"
        "hunk 2: line 4 -> lines 5-7\n"
        "  - print(1)  [process group and launch]\n"
        "  + model = torch.nn.parallel.DistributedDataParallel(model)  [model wrapping and sharding annotations]\n"
        "  + if dist.get_rank() == 0:  [process group and launch, communication]\n"
        "  +     print(1)  [process group and launch]\n"
    )


def test_the_same_as_data_and_as_a_patch(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["changes", "train.py", "ddp.py", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["added"], data["deleted"], data["hunks"], data["common"], data["communication"]) == (4, 1, 2, 2, 2)
    assert data["changes"][0]["port_lines"] == [2, 2]
    assert data["changes"][0]["added"][0]["category"] == "imports"
    assert main(["changes", "train.py", "ddp.py", "--format", "patch"]) == 0
    (pair / "a.patch").write_text(capsys.readouterr().out)
    subprocess.run(["git", "apply", "a.patch"], cwd=pair, check=True, capture_output=True)
    assert (pair / "train.py").read_text() == PORT


def test_the_same_code_and_nothing_in_common_are_said(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pair / "same.py").write_text(f"# a note\n{BASELINE}")
    assert main(["changes", "train.py", "same.py"]) == 0
    assert capsys.readouterr().out == "train.py -> same.py: the same code\n"
    (pair / "other.py").write_text("x = 2\n")
    assert main(["changes", "train.py", "other.py"]) == 0
    assert text.NOTHING_IN_COMMON in capsys.readouterr().out
    (pair / "empty.py").write_text("")
    assert main(["changes", "empty.py", "empty.py"]) == 0


@pytest.mark.parametrize("name", ["none.py", "notebook.ipynb", ".", "broken.py", "latin.py"])
def test_what_is_no_script_is_a_usage_error(pair: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (pair / "broken.py").write_text("x = (\n")
    (pair / "latin.py").write_bytes(b"x = 1\ny = 2\nz = '\xe4'\n")
    assert main(["changes", "train.py", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"portmatrix: {name}")
    assert captured.err.count("\n") == 1
