"""A plan has every cell of a definition, in order, with all that a run needs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from matrix.accuracy import BY_DTYPE, PRECISIONS
from matrix.definition import load
from matrix.errors import UsageError
from matrix.journal import Expectation, Layout, PlannedCell
from matrix.plan import Plan, plan

HEAD = """\
matrix:
  workload: [toy]
  backend: [jax, torch]
  accelerator: [cpu, cuda]
  layout: [single, dp2]
layouts:
  dp2: {devices: 2, strategy: data}
"""
FURTHER = """\
matrix:
  workload: [toy]
  backend: [torch]
  accelerator: [cpu]
  layout: [single]
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
      - {file: any.py, for: {backend: [torch, torch-compile], devices: 2}}
  torch-compile:
    baseline: {file: compiled.py}
arguments: {steps: --steps, size: --size, seed: --seed, dtype: --dtype, log_every: --log-every}
reference: {file: reference.csv, tolerance: {ieee-f32: 1e-5, bf16: 1e-2}}
"""

Planned = Callable[..., Plan]
Refusal = Callable[..., str]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    folder = tmp_path / "workloads" / "toy"
    folder.mkdir(parents=True)
    for name in ("train.py", "portable.py", "ddp.py", "any.py", "compiled.py"):
        (folder / name).write_text("")
    (folder / "reference.csv").write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in range(1, 201)))
    (folder / "workload.yaml").write_text(TOY)
    return folder


@pytest.fixture
def planned(tmp_path: Path, toy: Path) -> Planned:
    def make(text: str, workload: str = TOY) -> Plan:
        (tmp_path / "mine.yaml").write_text(text)
        (toy / "workload.yaml").write_text(workload)
        return plan(load(tmp_path / "mine.yaml"))

    return make


@pytest.fixture
def refusal(tmp_path: Path, planned: Planned) -> Refusal:
    """What is said of a definition or its workload, without the folder."""

    def said(text: str, workload: str = TOY) -> str:
        with pytest.raises(UsageError) as caught:
            planned(text, workload)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return said


def ids(plan: Plan) -> list[str]:
    return [cell.id for cell in plan.cells]


def notices(plan: Plan, folder: Path) -> list[str]:
    return [each.replace(f"{folder}/", "") for each in plan.notices]


def test_the_cells_are_the_product_of_the_axes_in_the_order_written(planned: Planned) -> None:
    assert ids(planned(HEAD)) == [
        "toy/jax/cpu/single",
        "toy/jax/cpu/dp2",
        "toy/jax/cuda/single",
        "toy/jax/cuda/dp2",
        "toy/torch/cpu/single",
        "toy/torch/cpu/dp2",
        "toy/torch/cuda/single",
        "toy/torch/cuda/dp2",
    ]


def test_exclude_removes_cells_and_include_then_adds_some(planned: Planned) -> None:
    text = HEAD + (
        "exclude: [{backend: jax}, {accelerator: cuda, layout: [single, dp2]}]\n"
        "include:\n"
        "  - {workload: toy, backend: jax, accelerator: cpu, layout: single}\n"
        "  - {workload: toy, backend: torch-compile, accelerator: tpu, layout: dp2}\n"
    )
    assert ids(planned(text)) == [
        "toy/torch/cpu/single",
        "toy/torch/cpu/dp2",
        "toy/jax/cpu/single",
        "toy/torch-compile/tpu/dp2",
    ]


def test_matchers_know_the_properties_of_a_layout(planned: Planned) -> None:
    assert ids(planned(HEAD + "exclude: [{backend: jax}, {accelerator: cuda, strategy: data}, {devices: 1}]\n")) == [
        "toy/torch/cpu/dp2"
    ]


def test_further_axes_end_the_id_sorted_by_name_and_reach_the_script(planned: Planned) -> None:
    text = FURTHER + (
        "  width: [8, 16]\n  attention: [sdpa]\n"
        "axes: {width: {argument: --width}, attention: {environment: ATTENTION}}\n"
        "include: [{workload: toy, backend: jax, accelerator: cpu, layout: single, width: 32, attention: flash}]\n"
    )
    cells = planned(text).cells
    assert [cell.id for cell in cells] == [
        "toy/torch/cpu/single/attention=sdpa/width=8",
        "toy/torch/cpu/single/attention=sdpa/width=16",
        "toy/jax/cpu/single/attention=flash/width=32",
    ]
    assert cells[1].arguments == ["--width", "16"]
    assert cells[1].environment == {"ATTENTION": "sdpa"}
    assert cells[1].axes["width"] == "16"


def test_a_further_axis_with_the_flag_of_a_setting_is_that_setting(planned: Planned) -> None:
    text = FURTHER + (
        "  precision: [float32, bfloat16]\n  start: [1, 2]\n"
        "axes: {precision: {argument: --dtype}, start: {argument: --seed}}\n"
    )
    last = planned(text).cells[-1]
    assert (last.run.dtype, last.run.seed, last.arguments) == ("bfloat16", 2, [])


def test_a_cell_has_the_scripts_of_its_backend_or_of_the_backends_framework_or_none(planned: Planned) -> None:
    text = HEAD.replace("[jax, torch]", "[jax, torch, torch-compile]").replace("[cpu, cuda]", "[cpu]")
    scripts = {}
    for cell in planned(text).cells:
        baseline, ports = cell.sources()
        scripts[cell.id] = (baseline.name if baseline else None, [port.name for port in ports])
    assert scripts == {
        "toy/jax/cpu/single": (None, []),
        "toy/jax/cpu/dp2": (None, []),
        "toy/torch/cpu/single": ("train.py", ["portable.py"]),
        "toy/torch/cpu/dp2": ("train.py", ["ddp.py", "any.py"]),
        "toy/torch-compile/cpu/single": ("compiled.py", []),
        "toy/torch-compile/cpu/dp2": ("compiled.py", []),
    }


def test_without_scripts_of_its_own_a_backend_runs_those_of_its_framework(planned: Planned) -> None:
    workload = TOY.replace("  torch-compile:\n    baseline: {file: compiled.py}\n", "")
    cell = planned(HEAD.replace("[jax, torch]", "[torch-compile]"), workload).cells[1]
    baseline, ports = cell.sources()
    assert baseline is not None
    assert (baseline.name, [port.name for port in ports]) == ("train.py", ["ddp.py", "any.py"])


def test_later_overrides_win(planned: Planned) -> None:
    text = HEAD + (
        "run: {steps: 10, timeout: 60, measure: {processes: 5}}\n"
        "override:\n"
        "  - {match: {backend: [jax, torch]}, run: {timeout: 100, steps: 20}}\n"
        "  - {match: {backend: torch, layout: dp2}, run: {timeout: 200, measure: {steps: 150}}}\n"
    )
    cells = {cell.id: cell.run for cell in planned(text).cells}
    single, dp2 = cells["toy/torch/cpu/single"], cells["toy/torch/cpu/dp2"]
    assert (single.steps, single.timeout, single.measure.steps) == (20, 100.0, 120)
    assert (dp2.steps, dp2.timeout, dp2.measure.steps, dp2.measure.processes) == (20, 200.0, 150, 5)


def test_later_expectations_win(planned: Planned) -> None:
    text = HEAD + (
        "expect:\n"
        "  - {match: {backend: torch}, cause: hang, reason: first}\n"
        "  - {match: {layout: dp2}, cause: timeout, reason: second, until: 2027-06-30}\n"
    )
    cells = {cell.id: cell.expectation for cell in planned(text).cells}
    assert cells["toy/jax/cpu/single"] is None
    assert cells["toy/torch/cpu/single"] == Expectation(cause="hang", reason="first")
    assert cells["toy/torch/cpu/dp2"] == Expectation(cause="timeout", reason="second", until="2027-06-30")


def test_required_cells_are_those_that_match_every_axis_of_require(planned: Planned) -> None:
    required = [
        cell.id for cell in planned(HEAD + "require: {accelerator: cuda, layout: single}\n").cells if cell.required
    ]
    assert required == ["toy/jax/cuda/single", "toy/torch/cuda/single"]
    assert not any(cell.required for cell in planned(HEAD).cells)


def test_a_cell_is_planned_as_the_journal_lists_it(planned: Planned) -> None:
    text = HEAD + "expect: [{match: {layout: dp2}, cause: hang, reason: r}]\nrequire: {accelerator: [cpu]}\n"
    cells = {cell.id: cell.planned() for cell in planned(text).cells}
    assert cells["toy/torch/cpu/dp2"] == PlannedCell(
        cell="toy/torch/cpu/dp2",
        axes={"workload": "toy", "backend": "torch", "accelerator": "cpu", "layout": "dp2"},
        layout=Layout(name="dp2", nodes=1, devices=2, strategy="data"),
        unit="tokens",
        written_for="cuda",
        expectation=Expectation(cause="hang", reason="r"),
        required=True,
        sources=("train.py", "ddp.py", "any.py"),
    )
    assert cells["toy/jax/cpu/single"].written_for is None


def test_a_file_that_is_there_twice_in_one_cell_is_refused(refusal: Refusal, planned: Planned) -> None:
    port = "      - {file: ddp.py, launch: torchrun, for: {strategy: data}}\n"
    for again in (
        "      - {file: ddp.py, arguments: [--fast], for: {devices: 2}}\n",
        "      - {file: train.py, launch: torchrun, for: {devices: 2}}\n",
    ):
        name = again.partition("file: ")[2].partition(",")[0]
        said = refusal(HEAD, TOY.replace(port, port + again))
        assert f"workload.yaml:9:16: '{name}' is there twice for toy/torch/cpu/dp2: narrow 'for'" in said
    other = "      - {file: ddp.py, arguments: [--fast], for: {strategy: tensor}}\n"
    assert planned(HEAD, TOY.replace(port, port + other)).cells


def test_matchers_that_match_nothing_and_repeated_cells_are_reported_not_refused(
    planned: Planned, tmp_path: Path
) -> None:
    text = HEAD + (
        "exclude: [{backend: jax}, {accelerator: rocm}]\n"
        "include:\n"
        "  - {workload: toy, backend: torch, accelerator: cpu, layout: single}\n"
        "override: [{match: {backend: jax}, run: {steps: 5}}]\n"
        "expect: [{match: {workload: resnet}, cause: hang, reason: r}]\n"
        "require: {accelerator: [cuda, tpu]}\n"
    )
    made = planned(text)
    assert len(made.cells) == 4
    assert notices(made, tmp_path) == [
        "mine.yaml:8:27: exclude[1]: this matches no cell",
        "mine.yaml:10:5: include[0]: this cell is there already",
        "mine.yaml:11:20: override[0].match: this matches no cell",
        "mine.yaml:12:18: expect[0].match: this matches no cell",
        "mine.yaml:13:31: require.accelerator[1]: this matches no cell",
    ]


def test_requirements_that_no_one_cell_meets_together_are_reported(planned: Planned, tmp_path: Path) -> None:
    text = HEAD + "exclude: [{backend: jax, accelerator: cuda}]\nrequire: {backend: jax, accelerator: cuda}\n"
    assert notices(planned(text), tmp_path) == ["mine.yaml:9:10: require: this matches no cell"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "exclude: [{workload: toy}]\n", "mine.yaml:8:10: no cell is left: 'exclude' removes them all"),
        (
            HEAD + "run: {steps: 201}\n",
            "mine.yaml:8:14: 201 steps, but the reference of toy ends at step 200",
        ),
        (
            HEAD + "run: {measure: {steps: 300}}\n",
            "mine.yaml:8:24: 300 steps, but the reference of toy ends at step 200",
        ),
        (
            HEAD + "override:\n  - {match: {layout: dp2}, run: {steps: 999}}\n",
            "mine.yaml:9:41: 999 steps, but the reference of toy ends at step 200",
        ),
        (
            HEAD + "run: {steps: 10, log_every: 11}\n",
            "mine.yaml:8:29: log_every is 11, but there are 10 steps: nothing would be logged",
        ),
        (
            HEAD + "run: {dtype: float16}\n",
            "mine.yaml:8:14: dtype float16 needs a tolerance for f16, but toy has only ieee-f32, bf16",
        ),
        (HEAD + "run: {dtype: bflot16}\n", "mine.yaml:8:14: unknown dtype 'bflot16': did you mean 'bfloat16'?"),
        (
            FURTHER + "  precision: [float32, half]\naxes: {precision: {argument: --dtype}}\n",
            "mine.yaml:6:24: dtype half needs a tolerance for f16, but toy has only ieee-f32, bf16",
        ),
        (
            FURTHER + "  start: [10, many]\naxes: {start: {argument: --seed}}\n",
            "mine.yaml:6:15: 'many' is no value for the setting 'seed'",
        ),
        (
            FURTHER + "  length: [10, 20]\naxes: {length: {argument: --steps}}\n",
            "mine.yaml:7:27: 'steps' is no axis: the run decides it, and a measurement decides otherwise",
        ),
        (
            HEAD.replace("[toy]", "[toy, toyy]"),
            "mine.yaml:2:19: unknown workload 'toyy': did you mean 'toy'? (looked for workload.yaml under workloads, ",
        ),
    ],
)
def test_what_cannot_be_run_as_written_is_refused_with_its_place(refusal: Refusal, text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_defaults_reach_no_further_than_the_reference(planned: Planned, toy: Path) -> None:
    (toy / "reference.csv").write_text("step,loss\n1,2\n20,1\n")
    run = planned(HEAD).cells[-1].run
    assert (run.steps, run.measure.steps, run.measure.log_every) == (20, 20, 1)
    assert planned(HEAD + "run: {steps: 5}\n").cells[-1].run.steps == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bf16", "float64"])
def test_a_dtype_with_a_tolerance_is_accepted_and_float64_may_use_that_of_float32(planned: Planned, dtype: str) -> None:
    assert planned(HEAD + f"run: {{dtype: {dtype}}}\n").cells[0].run.dtype == dtype


def test_steps_and_dtype_are_free_without_a_reference(planned: Planned) -> None:
    workload = TOY.replace("reference: {file: reference.csv, tolerance: {ieee-f32: 1e-5, bf16: 1e-2}}\n", "")
    cell = planned(HEAD + "run: {steps: 5000, dtype: float8}\n", workload).cells[-1]
    assert cell.reference is None
    assert cell.run.steps == 5000


def test_the_reference_of_an_implementation_is_the_one_that_counts(refusal: Refusal, toy: Path) -> None:
    (toy / "short.csv").write_text("step,loss\n1,2\n40,1\n")
    workload = TOY.replace(
        "    baseline: {file: compiled.py}\n",
        "    baseline: {file: compiled.py}\n    reference: {file: short.csv, tolerance: {ieee-f32: 1e-5}}\n",
    )
    text = HEAD.replace("[jax, torch]", "[torch, torch-compile]") + "run: {steps: 40, measure: {steps: 50}}\n"
    assert refusal(text, workload) == "mine.yaml:8:35: 50 steps, but the reference of toy ends at step 40"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{strategy: data}", "{strategy: date}", "8:58: unknown strategy 'date': did you mean 'data'?"),
        ("{strategy: data}", "{stratgy: data}", "8:48: unknown axis 'stratgy': did you mean 'strategy'?"),
        ("{strategy: data}", "{backend: troch}", "8:57: unknown backend 'troch': did you mean 'torch'?"),
        ("{strategy: data}", "{accelerator: [cpu, cudo]}", "8:67: unknown accelerator 'cudo': did you mean 'cuda'?"),
    ],
)
def test_a_port_for_cells_that_cannot_be_is_refused_with_its_place(
    refusal: Refusal, old: str, new: str, message: str
) -> None:
    assert refusal(HEAD, TOY.replace(old, new)) == f"workloads/toy/workload.yaml:{message}"


@pytest.mark.parametrize(
    ("serves", "message"),
    [
        (
            "{width: 8}",
            "8:48: unknown axis 'width': valid: accelerator, backend, devices, layout, nodes, strategy, workload",
        ),
        ("{layout: dp3}", "8:56: unknown layout 'dp3': did you mean 'dp2'?"),
        ("{strategy: dataa}", "8:58: unknown strategy 'dataa': did you mean 'data'?"),
        (
            "{backend: [torch, tensorflow]}",
            "8:65: unknown backend 'tensorflow': valid: jax, torch, torch-compile, torch-tpu, torch-xla, "
            "torch-xla-compile",
        ),
    ],
)
def test_a_port_for_cells_that_there_cannot_be_is_refused(refusal: Refusal, serves: str, message: str) -> None:
    said = refusal(HEAD, TOY.replace("{strategy: data}", serves))
    assert said.removeprefix("workloads/toy/workload.yaml:") == message


def test_a_port_may_serve_backends_and_strategies_that_the_matrix_leaves_out(planned: Planned) -> None:
    new = "for: {backend: jax, accelerator: tpu, strategy: tensor}"
    assert planned(HEAD.replace("[jax, torch]", "[torch]"), TOY.replace("for: {strategy: data}", new)).cells


def test_a_plan_is_bounded(refusal: Refusal) -> None:
    values = list(range(400))
    axes = f"  a: {values}\n  b: {values}\naxes: {{a: {{argument: --a}}, b: {{argument: --b}}}}\n"
    assert refusal(FURTHER + axes) == "mine.yaml:2:3: the matrix has 160,000 cells, expected at most 100,000"


def test_a_selection_is_exact_by_axis_and_property(planned: Planned) -> None:
    made = planned(HEAD.replace("[jax, torch]", "[torch, torch-compile]"))
    assert ids(made.select("backend=torch,layout=dp2")) == ["toy/torch/cpu/dp2", "toy/torch/cuda/dp2"]
    assert ids(made.select("strategy=data, accelerator=cpu")) == ["toy/torch/cpu/dp2", "toy/torch-compile/cpu/dp2"]
    assert len(made.select("backend=torch|torch-compile").cells) == 8
    assert ids(made.select("backend=torch,backend=torch-compile,accelerator=cpu,layout=single")) == [
        "toy/torch/cpu/single",
        "toy/torch-compile/cpu/single",
    ]
    assert ids(made.select("")) == ids(made)


def test_a_selection_can_be_written_down_and_narrowed(planned: Planned) -> None:
    made = planned(HEAD)
    assert made.selection == ""
    narrowed = made.select("backend=jax|torch").select("layout=dp2").select("backend=torch")
    assert narrowed.selection == "backend=torch,layout=dp2"
    assert ids(made.select(narrowed.selection)) == ids(narrowed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bakend=torch", "--select: unknown axis 'bakend': did you mean 'backend'?"),
        ("backend=torhc", "--select: no cell has backend 'torhc': did you mean 'torch'?"),
        ("backend=", "--select: no cell has backend '': valid: jax, torch"),
        ("torch", "--select: expected AXIS=VALUE, got 'torch'"),
        ("accelerator=tpu", "--select: no cell has accelerator 'tpu': did you mean 'cpu'?"),
        ("layout=single,strategy=data", "--select: none of the 8 cells is 'layout=single,strategy=data'"),
    ],
)
def test_a_selection_of_nothing_is_refused_with_the_nearest_word(planned: Planned, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(HEAD).select(text)
    assert str(caught.value) == message


def test_the_shipped_definitions_plan() -> None:
    assert ids(plan(load("smoke"))) == ["digits/jax/cpu/single", "digits/torch/cpu/single"]
    cpu = plan(load("cpu"))
    assert len(cpu.cells) == 78  # 3 workloads x 3 backends x 4 accelerators x 2 layouts - 2; digits-cuda: torch only
    assert {c.backend.name for c in cpu.cells if c.workload.name == "digits-cuda"} == {"torch"}
    assert cpu.notices == ()
    assert plan(load("nightly")).notices == ()
    absent = plan(load("absent"))
    assert absent.notices == ()
    targets = {cell.id: [each.about for each in cell.targets] for cell in absent.cells}
    expected = {
        "gpt/jax/cpu/single/size=tiny": [],
        "gpt/jax/tpu/single/size=tiny": ["TPU v5e 2x2"],
        "gpt/jax/tpu/tp8/size=tiny": ["2 slices of TPU v5e 2x2"],
        "gpt/jax/tpu/hybrid64/size=small": ["TPU v5p 4x4x4"],
        "gpt/jax/cuda/fsdp4/size=tiny": ["NVIDIA H100 80GB HBM3"],
        "gpt/jax/rocm/dp4/size=tiny": ["ROCM"],
    }
    assert {cell: targets[cell] for cell in expected} == expected


def test_dtypes_name_only_precisions_that_a_tolerance_can_have() -> None:
    assert set(BY_DTYPE.values()) <= set(PRECISIONS)


def test_a_reference_holds_for_the_settings_it_was_made_with(planned: Planned) -> None:
    workload = TOY.replace("{file: reference.csv,", "{file: reference.csv, holds_for: {size: tiny, seed: 0},")
    for run, held in (("{}", True), ("{seed: 0}", True), ("{seed: 1}", False), ("{size: small}", False)):
        assert (planned(HEAD + f"run: {run}\n", workload).cells[-1].reference is not None) == held, run
