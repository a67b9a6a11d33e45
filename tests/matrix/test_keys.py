"""The key of an attempt changes with what decides how it comes out, and with nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from matrix import keys
from matrix.attempt import variables
from matrix.environments import Interpreter
from matrix.plan import Cell
from tests.matrix.harness import Bench

PYTHON = Interpreter("/x/python", "current", "3.11.7", {"torch": "2.6"})


def digest(folder: Path, *without: str) -> str:
    return keys.data_digest(folder, frozenset(without))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "workload"
    (made / "data").mkdir(parents=True)
    (made / "data" / "a.csv").write_text("1,2\n")
    (made / "train.py").write_text("print()\n")
    return made


def test_the_digest_of_data_covers_names_and_bytes(folder: Path) -> None:
    found = {digest(folder)}
    (folder / "data" / "a.csv").write_text("1,3\n")
    found.add(digest(folder))
    (folder / "data" / "a.csv").rename(folder / "data" / "b.csv")
    found.add(digest(folder))
    (folder / "data" / "empty").touch()
    found.add(digest(folder))
    assert len(found) == 4


def test_the_digest_of_data_leaves_out_sources_caches_and_hidden_files(folder: Path) -> None:
    before = digest(folder, "train.py")
    (folder / "train.py").write_text("print(1)\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "index").touch()
    (folder / ".hidden").touch()
    os.utime(folder / "data" / "a.csv", (1, 1))
    assert digest(folder, "train.py") == before


def test_the_digest_of_data_follows_links_and_ends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "big.bin").write_bytes(b"1")
    (folder / "linked").symlink_to(tmp_path / "shared")
    (folder / "data" / "up").symlink_to(folder)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    before = digest(folder)
    (tmp_path / "shared" / "big.bin").write_bytes(b"2")
    assert digest(folder) != before


def test_a_large_file_counts_by_size_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "WHOLE", 3)
    os.utime(folder / "data" / "a.csv", (1, 1))
    before = digest(folder)
    os.utime(folder / "data" / "a.csv", (2, 2))
    assert digest(folder) != before


def test_a_file_that_is_gone_before_it_is_read_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(keys, "file_digest", gone)
    assert digest(folder)


def test_data_is_read_once_in_a_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = made(bench)
    before = keys.key(cell, cell.sources()[0], PYTHON, "correctness")
    (cell.workload.folder / "written-by-the-script.pt").touch()
    assert keys.key(cell, cell.sources()[0], PYTHON, "correctness") == before


def made(bench: Bench, name: str = "w", **run: object) -> Cell:
    bench.workload(
        name,
        {"train.py": "print()\n", "port.py": "print(1)\n"},
        {"torch": {"baseline": {"file": "train.py"}, "ports": [{"file": "port.py", "for": {"strategy": "single"}}]}},
        reference="step,loss\n" + "".join(f"{step},1.0\n" for step in range(1, 200)),
    )
    return bench.cell(name, **run)


def test_the_key_is_that_of_source_interpreter_phase_and_settings(bench: Bench) -> None:
    cell = made(bench)
    baseline, (port,) = cell.sources()
    newer = Interpreter("/x/python", "current", "3.11.7", {"torch": "2.7"})
    other = Interpreter("/y/python", "current", "3.11.7", {"torch": "2.6"})
    found = [
        keys.key(cell, baseline, PYTHON, "correctness"),
        keys.key(cell, baseline, PYTHON, "measurement"),
        keys.key(cell, port, PYTHON, "correctness"),
        keys.key(cell, baseline, newer, "correctness"),
        keys.key(cell, baseline, other, "correctness"),
        keys.key(cell, None, PYTHON, "correctness"),
        keys.key(bench.cell("w", seed=7), baseline, PYTHON, "correctness"),
        keys.key(bench.cell("w", dtype="float64"), baseline, PYTHON, "correctness"),
    ]
    assert len(set(found)) == len(found)
    assert keys.key(bench.cell("w"), baseline, PYTHON, "correctness") == found[0]


def test_the_key_covers_how_backend_and_accelerator_set_a_cell_up(bench: Bench, tmp_path: Path) -> None:
    cell = made(bench)
    (tmp_path / "observer.py").write_text("def observe(after_import): ...\n")
    cells = [
        cell,
        replace(cell, backend=replace(cell.backend, flags=("compile",))),
        replace(cell, backend=replace(cell.backend, environment={"X": "1"})),
        replace(cell, backend=replace(cell.backend, compiles=True)),
        replace(cell, backend=replace(cell.backend, observer=tmp_path / "observer.py")),
        replace(cell, accelerator=replace(cell.accelerator, environment=lambda framework, devices: {"Y": framework})),
    ]
    assert len({keys.key(each, cell.sources()[0], PYTHON, "correctness") for each in cells}) == len(cells)


def test_how_much_is_measured_concerns_the_measurement_only(bench: Bench) -> None:
    cell, longer = made(bench), bench.cell("w", measure={"steps": 60})
    source = cell.sources()[0]
    first, second = (
        [keys.key(each, source, PYTHON, phase) for phase in ("correctness", "measurement")] for each in (cell, longer)
    )
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("import train\n", True),
        ("from train import model\n", True),
        ("from . import train\n", True),
        ("import importlib\nimportlib.import_module('train')\n", True),
        ("import runpy\nrunpy.run_path('torch/train.py', run_name='__main__')\n", True),
        ("import helper\n", True),  # which imports it
        ("import other\n", True),  # another port, which imports it
        ("import trainer\n", False),
        ("def train(): ...\n", False),
        ("print('how to train.py this')\n", False),
        ("import numpy.train\n", False),
        ("this is no Python\n", False),
    ],
)
def test_the_key_covers_the_sources_that_a_source_uses_and_no_others(bench: Bench, text: str, again: bool) -> None:
    ports = [{"file": f"torch/{name}.py", "for": {"strategy": "single"}} for name in ("port", "other")]
    folder = bench.workload(
        "w",
        {
            "torch/train.py": "model = 1\n",
            "torch/port.py": text,
            "torch/other.py": "from train import model\n",
            "torch/helper.py": "def model():\n    import train\n",
            "jax/train.py": "print()\n",
        },
        {
            "torch": {"baseline": {"file": "torch/train.py"}, "ports": ports},
            "jax": {"baseline": {"file": "jax/train.py"}},
        },
    )
    cell = bench.cell("w")
    baseline, (port, _) = cell.sources()

    def found() -> list[str]:
        return [keys.key(cell, source, PYTHON, "correctness") for source in (baseline, port)]

    first = found()
    (folder / "jax" / "train.py").write_text("print(2)\n")
    (folder / "torch" / "other.py").write_text("from train import model as m\n")
    second = found()
    assert second[0] == first[0]
    assert (second[1] != first[1]) is (text == "import other\n")
    (folder / "torch" / "train.py").write_text("model = 2\n")
    third = found()
    assert third[0] != second[0]
    assert (third[1] != second[1]) is again


def test_the_key_covers_all_that_runs_inside_a_cell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = made(bench)
    before = keys.key(cell, cell.sources()[0], PYTHON, "correctness")
    monkeypatch.setattr(keys, "_inside", lambda: "edited")
    assert keys.key(cell, cell.sources()[0], PYTHON, "correctness") != before


def test_the_key_covers_the_environment_of_what_drives_the_device(bench: Bench) -> None:
    cell = made(bench)
    accelerator = replace(cell.accelerator, environment=lambda framework, devices: {"Y": framework})
    driven = replace(cell, accelerator=accelerator, backend=replace(cell.backend, through="xla"))
    asked = replace(driven, accelerator=replace(accelerator, environment=lambda framework, devices: {"Y": "xla"}))
    assert variables(driven, 1, 1)["Y"] == "xla"
    first, second = (keys.key(each, cell.sources()[0], PYTHON, "correctness") for each in (driven, asked))
    assert first == second
