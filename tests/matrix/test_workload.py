"""A workload's folder is read and checked: its scripts are there, its reference and its settings are well formed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from matrix import workload
from matrix.errors import UsageError
from matrix.journal import Layout, Reference
from matrix.workload import Source, matches

FULL = """\
about: decoder-only language model
unit: tokens
implementations:
  torch:
    baseline: {file: torch/train.py, written_for: cuda}
    ports:
      - {file: torch/ddp.py, launch: torchrun, for: {strategy: data}}
      - {file: torch/train.py, for: {backend: torch-xla, strategy: [single, data], devices: 2}}
  jax:
    baseline: {file: jax/train.py}
    reference: {file: jax/reference.csv, tolerance: {tf32: 0.5}}
arguments: {steps: --steps, log_every: --log-every, compile: --compile}
progress: 'epoch (?P<step>[0-9]+): (?P<loss>[0-9.]+)'
reference: {file: reference.csv, tolerance: {ieee-f32: 1e-5, bf16: '1e-2'}}
"""
SMALL = """\
about: small
unit: examples
implementations:
  torch: {baseline: {file: train.py}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("torch/train.py", "torch/ddp.py", "jax/train.py", "train.py"):
        (tmp_path / "gpt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "gpt" / name).write_text("print('step=1 loss=1')\n")
    (tmp_path / "gpt" / "reference.csv").write_text("step,loss\n1,2.5\n2,2.25\neval,2.125\n")
    (tmp_path / "gpt" / "jax" / "reference.csv").write_text("step,loss\n1,3\n")
    return tmp_path / "gpt"


@pytest.fixture
def refusal(folder: Path) -> Callable[[str], str]:
    """What is said of a workload.yaml, without the folder."""

    def said(text: str) -> str:
        (folder / "workload.yaml").write_text(text)
        with pytest.raises(UsageError) as caught:
            workload.load(folder)
        return str(caught.value).replace(f"{folder}/", "").removeprefix("workload.yaml:")

    return said


def test_a_workload_with_everything_is_read_as_written(folder: Path) -> None:
    (folder / "workload.yaml").write_text(FULL)
    loaded = workload.load(folder)
    assert (loaded.name, loaded.folder, loaded.unit) == ("gpt", folder, "tokens")
    torch = loaded.implementations["torch"]
    assert torch.baseline == Source(
        file=folder / "torch/train.py",
        name="torch/train.py",
        role="baseline",
        launch=None,
        serves={},
        written_for="cuda",
        place=("implementations", "torch", "baseline"),
    )
    assert [(port.name, port.role, port.launch, port.serves) for port in torch.ports] == [
        ("torch/ddp.py", "port", "torchrun", {"strategy": ("data",)}),
        (
            "torch/train.py",
            "port",
            None,
            {"backend": ("torch-xla",), "strategy": ("single", "data"), "devices": ("2",)},
        ),
    ]
    assert loaded.implementations["jax"].baseline.written_for == "any"
    assert loaded.arguments == {"steps": "--steps", "log_every": "--log-every", "compile": "--compile"}
    assert loaded.progress == "epoch (?P<step>[0-9]+): (?P<loss>[0-9.]+)"


def test_an_implementation_has_its_own_reference_or_the_workloads(folder: Path) -> None:
    (folder / "workload.yaml").write_text(FULL)
    loaded = workload.load(folder)
    shared = Reference(loss=[(1, 2.5), (2, 2.25)], eval=2.125, tolerance={"ieee-f32": 1e-5, "bf16": 1e-2})
    own = Reference(loss=[(1, 3.0)], eval=None, tolerance={"tf32": 0.5})
    assert loaded.reference_of(loaded.implementations["torch"]) == shared
    assert loaded.reference_of(loaded.implementations["jax"]) == own


def test_what_is_left_out_has_its_default(folder: Path) -> None:
    (folder / "workload.yaml").write_text(SMALL)
    loaded = workload.load(folder)
    assert (loaded.arguments, loaded.progress, loaded.reference) == ({}, None, None)
    assert loaded.implementations["torch"].ports == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("unit: tokens", "unit: token"), "2:7: expected 'tokens' or 'examples', got 'token': did you mean 'tokens'?"),
        (("about: decoder-only language model", "about:"), "1:7: expected text, got nothing"),
        (("unit: tokens\n", ""), "1:1: the key 'unit' is missing"),
        (("progress:", "progres:"), "13:1: unknown key 'progres': did you mean 'progress'?"),
        (("launch: torchrun", "lunch: torchrun"), "7:30: unknown key 'lunch': did you mean 'launch'?"),
        (("launch: torchrun", "launch: torchrum"), "7:38: unknown launcher 'torchrum': did you mean 'torchrun'?"),
        (("written_for: cuda", "written_for: cuba"), "5:51: unknown accelerator 'cuba': did you mean 'cuda'?"),
        ((", for: {strategy: data}", ""), "7:9: the key 'for' is missing"),
        (("for: {strategy: data}", "for: {}"), "7:53: expected at least one value, got keys and values"),
        (("for: {strategy: data}", "for: {strategy: [data, data]}"), "7:71: 'data' is there twice"),
        (
            ("for: {strategy: data}", "serves: {strategy: data}"),
            "7:48: unknown key 'serves': valid: arguments, file, for, launch",
        ),
        (("torch/ddp.py", "torch/dpp.py"), "7:16: the file 'torch/dpp.py' does not exist"),
        (("torch/ddp.py", "torch"), "7:16: the file 'torch' is no regular file"),
        (("torch/ddp.py", "."), "7:16: the file '.' is no regular file"),
        (("torch/ddp.py", "../gpt/train.py"), "7:16: expected a file in the workload's folder, got '../gpt/train.py'"),
        (("torch/ddp.py", "/etc/passwd"), "7:16: expected a file in the workload's folder, got '/etc/passwd'"),
        (("torch/ddp.py", "x" * 300), f"7:16: the file '{'x' * 57}...' does not exist"),
        (("steps: --steps", "stepz: --steps"), "12:13: unknown setting 'stepz': did you mean 'steps'?"),
        (("steps: --steps", "steps: steps"), "12:20: expected a flag such as --steps, or a key such as"),
        (("(?P<step>", "(?P<stap>"), "13:11: the expression has no group named 'step': (?P<step>...)"),
        (("(?P<loss>[0-9.]+)", "(?P<loss>["), "13:11: this is no regular expression: "),
        (("ieee-f32: 1e-5", "ieee-f32: 0"), "14:56: expected a positive number, got 0"),
        (("ieee-f32: 1e-5", "ieee-f32: .inf"), "14:56: expected a finite number, got inf"),
        (("ieee-f32: 1e-5", "ieee-f32: 1.0"), "14:56: expected a number of less than 1, got 1"),
        (("ieee-f32: 1e-5", "ieee-f32: small"), "14:56: expected a number, got 'small'"),
        (
            ("ieee-f32: 1e-5", "ieee-f31: 1e-5"),
            "14:46: expected 'ieee-f64', 'ieee-f32', 'tf32', 'bf16' or 'f16', got 'ieee-f31'",
        ),
        (("{ieee-f32: 1e-5, bf16: '1e-2'}", "{}"), "14:45: expected at least one value, got keys and values"),
        (("file: reference.csv", "file: none.csv"), "14:19: the file 'none.csv' does not exist"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_was_expected(
    refusal: Callable[[str], str], change: tuple[str, str], message: str
) -> None:
    assert refusal(FULL.replace(*change)).startswith(message)


def test_a_workload_has_at_least_one_implementation(refusal: Callable[[str], str]) -> None:
    said = refusal("about: a\nunit: tokens\nimplementations: {}\n")
    assert said == "3:18: expected at least one value, got keys and values"


def test_a_link_out_of_the_folder_is_no_source(folder: Path, refusal: Callable[[str], str]) -> None:
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to("/etc/passwd")
    assert refusal(SMALL) == "4:28: the file 'train.py' is a link that leads out of the workload's folder"


def test_a_link_within_the_folder_is_a_source(folder: Path) -> None:
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to("torch/train.py")
    (folder / "workload.yaml").write_text(SMALL)
    assert workload.load(folder).implementations["torch"].baseline.file == folder / "train.py"


def test_a_source_that_is_no_regular_file_is_refused(folder: Path, refusal: Callable[[str], str]) -> None:
    (folder / "train.py").unlink()
    os.mkfifo(folder / "train.py")
    assert refusal(SMALL) == "4:28: the file 'train.py' is no regular file"
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to("train.py")
    assert refusal(SMALL) == "4:28: the file 'train.py' is no regular file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "1: the first line of a reference must be 'step,loss'"),
        ("loss,step\n1,2\n", "1: the first line of a reference must be 'step,loss'"),
        ("step,loss\n", "1: the reference has no steps"),
        ("step,loss\neval,2\n", "2: the reference has no steps"),
        ("step,loss\n1,2\n2,nan\n", "3: expected a finite number after the comma, got 'nan'"),
        ("step,loss\n1,inf\n", "2: expected a finite number after the comma, got 'inf'"),
        ("step,loss\n1,1e999\n", "2: expected a finite number after the comma, got '1e999'"),
        ("step,loss\n1,1_0\n", "2: expected a finite number after the comma, got '1_0'"),
        ("step,loss\n1\n", "2: expected a finite number after the comma, got ''"),
        ("step,loss\n1,2,3\n", "2: expected a finite number after the comma, got '2,3'"),
        ("step,loss\n1,2\n\n2,3\n", "3: expected a finite number after the comma, got ''"),
        ("step,loss\nx,2\n", "2: expected a step or 'eval' before the comma, got 'x'"),
        ("step,loss\n-1,2\n", "2: expected a step or 'eval' before the comma, got '-1'"),
        ("step,loss\n1.5,2\n", "2: expected a step or 'eval' before the comma, got '1.5'"),
        ("step,loss\n" + "9" * 30 + ",2\n", f"2: expected a step or 'eval' before the comma, got '{'9' * 30}'"),
        ("step,loss\n1,2\n1,3\n", "3: steps must ascend, got 1 after 1"),
        ("step,loss\n5,2\n4,3\n", "3: steps must ascend, got 4 after 5"),
        ("step,loss\n1,2\neval,3\n2,3\n", "4: nothing may follow the row 'eval'"),
        ("step,loss\n1,2\neval@3,3\n", "3: an evaluation after step 3, which the reference does not have"),
        ("step,loss\n1,2\neval@1,3\n2,3\n", "4: a step after an evaluation; steps come first"),
        ("step,loss\n1,\0\n", "2:3: the control character U+0000 is not allowed"),
        ("#" * (1 << 21), " the file is larger than 1 MiB"),
    ],
)
def test_a_malformed_reference_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "reference.csv"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        workload.read_reference(path)
    assert str(caught.value) == f"{path}:{message}"


def test_a_reference_may_have_windows_line_ends_spaces_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "reference.csv"
    path.write_bytes(b"\xef\xbb\xbfstep, loss\r\n0, 2.5e0\r\n10, -1\r\neval, .5\r\n\r\n")
    assert workload.read_reference(path) == ([(0, 2.5), (10, -1.0)], {None: 0.5})


def test_a_reference_may_have_evaluations_after_earlier_steps(tmp_path: Path) -> None:
    path = tmp_path / "reference.csv"
    path.write_text("step,loss\n1,2\n2,1\neval@1,1.5\neval,0.5\n")
    assert workload.read_reference(path) == ([(1, 2.0), (2, 1.0)], {1: 1.5, None: 0.5})


def test_a_workload_is_looked_for_in_order_and_the_shipped_ones_come_last(tmp_path: Path) -> None:
    for place in ("first/a", "second/a", "second/b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "workload.yaml").write_text(SMALL)
    (tmp_path / "first" / "b").mkdir()  # a folder without workload.yaml is none
    search = [tmp_path / "none", tmp_path / "first", tmp_path / "second"]
    assert workload.find("a", search) == tmp_path / "first/a"
    assert workload.find("b", search) == tmp_path / "second/b"
    assert workload.find("digits", search) == workload.SHIPPED / "digits"


def test_an_unknown_workload_gets_the_nearest_there_is_and_where_was_looked(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "workload.yaml").write_text(SMALL)
    with pytest.raises(UsageError) as caught:
        workload.find("transfomer", [tmp_path, tmp_path / "none"])
    assert str(caught.value) == (
        "unknown workload 'transfomer': did you mean 'transformer'? "
        f"(looked for workload.yaml under {tmp_path}, {tmp_path}/none, {workload.SHIPPED})"
    )


def test_a_workload_file_that_is_none_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "workload.yaml")
    with pytest.raises(UsageError, match="this is no regular file"):
        workload.load(workload.find("a", [tmp_path]))


def test_a_matcher_holds_axes_and_properties_of_the_layout_against_lists() -> None:
    axes = {"backend": "torch", "accelerator": "cpu", "layout": "dp2"}
    layout = Layout(name="dp2", devices=2, strategy="data")
    assert matches({}, axes, layout)
    assert matches({"backend": ("jax", "torch"), "strategy": ("data",), "devices": ("2",)}, axes, layout)
    assert not matches({"backend": ("torch-compile",)}, axes, layout)
    assert not matches({"backend": ("torch",), "nodes": ("2",)}, axes, layout)


@pytest.mark.parametrize("name", ["digits", "digits-cuda"])
def test_the_shipped_workloads_load(name: str) -> None:
    loaded = workload.load(workload.find(name, []))
    assert loaded.name == name
    assert loaded.reference is not None
