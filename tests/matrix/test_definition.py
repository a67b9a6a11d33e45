"""A definition is read into its models, or refused with the place of the mistake and the nearest valid word."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from matrix import definition
from matrix.definition import Definition, Measure, Run, load
from matrix.errors import UsageError
from matrix.journal import Expectation, Layout

MATRIX = """\
matrix:
  workload: [digits]
  backend: [jax, torch]
  accelerator: [cpu, cuda]
  layout: [single]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    """What is said of a definition, without the path."""
    path = write(folder, text)
    with pytest.raises(UsageError) as caught:
        load(path)
    return str(caught.value).replace(f"{path}:", "")


def test_a_definition_with_everything_is_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    loaded = load(
        write(
            tmp_path,
            """\
matrix:
  workload: [digits, gpt]
  backend: [jax, torch, torch-compile]
  accelerator: [cpu, cuda]
  layout: [single, dp2]
  precision: [float32, bfloat16]
layouts:
  dp2: {devices: 2, strategy: data}
axes: {precision: {argument: --dtype}}
exclude:
  - {backend: [jax, torch], accelerator: cuda}
include:
  - {workload: gpt, backend: jax, accelerator: tpu, layout: dp2, precision: float32}
run: {size: tiny, steps: 20, timeout: 60, measure: {steps: 100}}
override:
  - match: {backend: torch-compile}
    run: {timeout: 1e3}
expect:
  - match: {workload: gpt, strategy: data}
    cause: wrong-result
    reason: batch statistics are per rank
    until: 2027-06-30
    link: https://example.org/issues/1
require: {accelerator: cuda}
environments:
  jax: {python: .tox/jax/bin/python}
workloads: [jobs]
""",
        )
    )
    assert loaded.matrix.axes == {
        "workload": ("digits", "gpt"),
        "backend": ("jax", "torch", "torch-compile"),
        "accelerator": ("cpu", "cuda"),
        "layout": ("single", "dp2"),
        "precision": ("float32", "bfloat16"),
    }
    assert loaded.layout("dp2") == Layout(name="dp2", nodes=1, devices=2, strategy="data")
    assert loaded.axes["precision"].argument == "--dtype"
    assert loaded.exclude == [{"backend": ("jax", "torch"), "accelerator": ("cuda",)}]
    assert loaded.include[0]["accelerator"] == "tpu"
    assert loaded.run.steps == 20
    assert loaded.override[0].run.timeout == 1000.0
    assert loaded.expect[0].until == datetime.date(2027, 6, 30)
    assert loaded.expect[0].expectation == Expectation(
        cause="wrong-result",
        reason="batch statistics are per rank",
        until="2027-06-30",
        link="https://example.org/issues/1",
    )
    assert loaded.require == {"accelerator": ("cuda",)}
    assert loaded.interpreter("jax") == tmp_path / ".tox/jax/bin/python"
    assert loaded.interpreter("torch") is None
    assert loaded.search == [tmp_path / "jobs"]
    assert loaded.path == tmp_path / "mine.yaml"
    assert loaded.name == "mine"


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, MATRIX))
    assert loaded.run.model_dump() == {
        "size": "tiny",
        "steps": 30,
        "seed": 0,
        "dtype": "float32",
        "log_every": 1,
        "timeout": 300.0,
        "no_progress": 120.0,
        "repeats": 1,
        "measure": {"processes": 3, "steps": 120, "log_every": 10},
    }
    assert loaded.layout("single") == Layout(name="single", nodes=1, devices=1, strategy="single")
    assert loaded.layout("dp2") is None
    assert loaded.search == [tmp_path / "workloads"]


def test_the_defaults_measure_at_least_ten_intervals_after_the_first() -> None:
    assert Measure().steps // Measure().log_every - 1 >= 10


def test_an_override_changes_what_it_sets_and_nothing_else() -> None:
    run = Run(steps=20, measure=Measure(steps=200, processes=5))
    merged = run.merged(Run.model_validate({"timeout": 9.0, "measure": {"log_every": 4}}))
    assert merged == Run(steps=20, timeout=9.0, measure=Measure(steps=200, processes=5, log_every=4))


def test_an_override_can_set_a_default_back() -> None:
    assert Run(steps=20).merged(Run(steps=30)).steps == 30


def test_what_to_show_of_absent_accelerators_is_given_by_name_or_in_full(tmp_path: Path) -> None:
    text = "evidence: {tpu: [v5e:2x2, {chips: v5e:2x2, num_slices: 2, for: {devices: 8}}], cuda: [h100], timeout: 60}\n"
    loaded = load(write(tmp_path, MATRIX + "layouts: {dp8: {devices: 8, strategy: data}}\n" + text))
    assert loaded.evidence.timeout == 60.0
    assert {name: [each.model_dump() for each in found] for name, found in loaded.evidence.targets.items()} == {
        "tpu": [
            {"chips": "v5e:2x2", "num_slices": 1, "serves": {}},
            {"chips": "v5e:2x2", "num_slices": 2, "serves": {"devices": ("8",)}},
        ],
        "cuda": [{"chips": "h100", "num_slices": 1, "serves": {}}],
    }


def test_numbers_and_booleans_on_an_axis_are_names_as_written(tmp_path: Path) -> None:
    text = MATRIX + "  bits: [8, 1.50, true, on, 2027-06-30]\naxes: {bits: {environment: BITS}}\n"
    loaded = load(write(tmp_path, text + "exclude: [{bits: 1.50}, {bits: [true, 8]}]\n"))
    assert loaded.matrix.axes["bits"] == ("8", "1.50", "true", "on", "2027-06-30")
    assert loaded.exclude == [{"bits": ("1.50",)}, {"bits": ("true", "8")}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runn: {steps: 3}\n", "6:1: unknown key 'runn': did you mean 'run'?"),
        ("run: {stepz: 3}\n", "6:7: unknown key 'stepz': did you mean 'steps'?"),
        ("run: {steps: abc}\n", "6:14: expected a whole number, got 'abc'"),
        ("run: {steps: '30'}\n", "6:14: expected a whole number, got '30'"),
        ("run: {steps: true}\n", "6:14: expected a whole number, got true"),
        ("run: {steps: 1.5}\n", "6:14: expected a whole number, got 1.5"),
        ("run: {steps: 0}\n", "6:14: expected a positive number, got 0"),
        ("run: {steps: -3}\n", "6:14: expected a positive number, got -3"),
        ("run: {steps: 1000000001}\n", "6:14: expected a number of at most 1000000000, got 1000000001"),
        ("run: {steps: 1" + "0" * 30 + "}\n", "6:14: this number has more than 18 digits"),
        ("run: {seed: -1}\n", "6:13: expected a number of at least 0, got -1"),
        ("run: {seed: 4294967296}\n", "6:13: expected a number of less than 4294967296, got 4294967296"),
        ("run: {timeout: 0}\n", "6:16: expected a positive number, got 0"),
        ("run: {timeout: .inf}\n", "6:16: expected a finite number, got inf"),
        ("run: {timeout: .nan}\n", "6:16: expected a finite number, got nan"),
        ("run: {timeout: 1e999}\n", "6:16: expected a finite number, got inf"),
        ("run: {timeout: soon}\n", "6:16: expected a number, got 'soon'"),
        ("run: {size: ''}\n", "6:13: expected text, got nothing"),
        ("run: {size: [a]}\n", "6:13: expected text, got a list"),
        ("run: [a]\n", "6:6: expected keys and values, got a list"),
        ("run:\n", "6:5: expected keys and values, got nothing"),
        ("run: {measure: {steps: no}}\n", "6:24: expected a whole number, got 'no'"),
        ("exclude: {backend: jax}\n", "6:10: expected a list, got keys and values"),
        ("exclude: [backend]\n", "6:11: expected keys and values, got 'backend'"),
        ("exclude: [{}]\n", "6:11: expected at least one value, got keys and values"),
        ("exclude: [{backend: []}]\n", "6:21: expected at least one value, got an empty list"),
        ("exclude: [{bakend: jax}]\n", "6:12: unknown axis 'bakend': did you mean 'backend'?"),
        ("exclude: [{backend: jaxx}]\n", "6:21: unknown backend 'jaxx': did you mean 'jax'?"),
        ("exclude: [{backend: [jax, torhc]}]\n", "6:27: unknown backend 'torhc': did you mean 'torch'?"),
        ("exclude: [{accelerator: gpu}]\n", "6:25: unknown accelerator 'gpu': did you mean 'tpu'?"),
        ("exclude: [{layout: dp2}]\n", "6:20: unknown layout 'dp2': valid: single"),
        ("exclude: [{strategy: date}]\n", "6:22: unknown strategy 'date': did you mean 'data'?"),
        ("exclude: [{devices: 4}]\n", "6:21: unknown devices '4': valid: 1"),
        ("require: {acelerator: [cuda]}\n", "6:11: unknown axis 'acelerator': did you mean 'accelerator'?"),
        ("override: [{match: {backend: jax}}]\n", "6:12: the key 'run' is missing"),
        ("override: [{match: {bakend: jax}, run: {}}]\n", "6:21: unknown axis 'bakend': did you mean 'backend'?"),
        ("expect: [{match: {backend: jax}, cause: hang}]\n", "6:10: the key 'reason' is missing"),
        (
            "expect: [{match: {backend: jax}, cause: hang, reason: r, until: soon}]\n",
            "6:65: expected a date such as 2027-06-30, got 'soon'",
        ),
        (
            "expect: [{match: {backend: jax}, cause: hang, reason: r, until: 2027-02-30}]\n",
            "6:65: expected a date such as 2027-06-30, got '2027-02-30'",
        ),
        (
            "expect: [{match: {backend: jax}, cause: hang, reason: r, link: 'javascript:x'}]\n",
            "6:64: expected a link that begins with https://, got 'javascript:x'",
        ),
        ("include: [{backend: jax}]\n", "6:11: an included cell must be complete: 'workload' is missing"),
        (
            "include: [{workload: digits, backend: jax, accelerator: cpuu, layout: single}]\n",
            "6:57: unknown accelerator 'cpuu': did you mean 'cpu'?",
        ),
        ("include: [{workload: [a]}]\n", "6:22: expected text, got a list"),
        ("include: [{xyzzy: red}]\n", "6:12: unknown axis 'xyzzy': valid: accelerator, backend, layout, workload"),
        ("environments: {jaxx: {python: p}}\n", "6:16: unknown backend 'jaxx': did you mean 'jax'?"),
        ("environments: {jax-tpuu: {python: p}}\n", "6:16: unknown backend 'jax-tpuu': did you mean 'jax-tpu'?"),
        ("evidence: {tpu: [v5e]}\n", "6:18: expected a TPU topology such as v5e:2x2, or 'any', got 'v5e'"),
        ("evidence: {tpu: [v5x:2x2]}\n", "6:18: unknown TPU 'v5x': did you mean 'v5p'?"),
        ("evidence: {cuda: [h1000]}\n", "6:19: unknown GPU 'h1000': did you mean 'h100'?"),
        ("evidence: {cpu: [h100]}\n", "6:18: cpu has no compiler that works without one: expected 'any', got 'h100'"),
        ("evidence: {tpuu: [any]}\n", "6:12: unknown accelerator 'tpuu': did you mean 'tpu'?"),
        ("evidence: {tpu: [{chips: v5e:2x2, slices: 2}]}\n", "6:35: unknown key 'slices': did you mean 'num_slices'?"),
        ("evidence: {tpu: [{chips: v5e:2x2, num_slices: 0}]}\n", "6:47: expected a positive number, got 0"),
        (
            "evidence: {cuda: [{chips: h100, num_slices: 2}]}\n",
            "6:19: only TPUs come in slices, and 'h100' is for cuda",
        ),
        (
            "evidence: {tpu: [{chips: v5e:2x2, for: {layout: dp3}}]}\n",
            "6:49: unknown layout 'dp3': valid: single",
        ),
        ("evidence: {tpu: []}\n", "6:17: expected at least one value, got an empty list"),
        ("evidence: {timeout: 0}\n", "6:21: expected a positive number, got 0"),
        ("environments: {jax: p}\n", "6:21: expected keys and values, got 'p'"),
        ("layouts: {single: {devices: 1}}\n", "6:11: the layout 'single' is built in: choose another name"),
        ("layouts: {a/b: {nodes: 2, strategy: data}}\n", "6:11: a name cannot contain '/', got 'a/b'"),
        (
            "layouts: {dp: {devices: 2, strategy: date}}\n",
            "6:38: expected 'single', 'data', 'fully-sharded', 'tensor' or 'hybrid', got 'date': did you mean 'data'?",
        ),
        (
            "layouts: {dp: {devices: 2}}\n",
            "6:15: strategy 'single' needs exactly one device, got nodes 1 x devices 2",
        ),
        (
            "layouts: {dp: {strategy: data}}\n",
            "6:15: strategy 'data' needs at least two devices, got nodes 1 x devices 1",
        ),
        ("layouts: {dp: {devices: 0, strategy: data}}\n", "6:25: expected a positive number, got 0"),
        (
            "layouts: {dp: {devices: 99999, nodes: 99999, strategy: data}}\n",
            "6:15: 9,999,800,001 devices in all, expected at most 1,048,576",
        ),
        ("axes: {precision: {argument: --dtype}}\n", "6:8: the axis 'precision' has no values under 'matrix'"),
        ("axes: {layout: {argument: --x}}\n", "6:8: 'layout' is built in: choose another name"),
        ("axes: {devices: {argument: --x}}\n", "6:8: 'devices' is built in: choose another name"),
        ("  xyzzy: [red]\n", "6:3: unknown axis 'xyzzy': a further axis is declared under 'axes'"),
        ("  layuot: [red]\n", "6:3: unknown axis 'layuot': did you mean 'layout'?"),
        (
            "  p: [a]\naxes: {p: {}}\n",
            "7:11: expected one of 'argument' (a flag) and 'environment' (a variable's name)",
        ),
        (
            "  p: [a]\naxes: {p: {argument: --p, environment: P}}\n",
            "7:11: expected one of 'argument' (a flag) and 'environment' (a variable's name)",
        ),
        ("  p: [a]\naxes: {p: {argument: p}}\n", "7:22: expected a flag such as --dtype, got 'p'"),
        ("  p: [a]\naxes: {p: {environment: A=B}}\n", "7:25: expected a variable's name, got 'A=B'"),
        ("workloads: [nowhere/at/all]\n", None),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_was_expected(tmp_path: Path, text: str, message: str | None) -> None:
    message = message or f"6:13: there is no folder '{tmp_path}/nowhere/at/all'"
    assert refusal(tmp_path, MATRIX + text) == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[jax, torch]", "[jax, jaxx]", "3:18: unknown backend 'jaxx': did you mean 'jax'?"),
        ("[jax, torch]", "[jax, torch, jax]", "3:25: 'jax' is there twice"),
        ("[jax, torch]", "[]", "3:12: expected at least one value, got an empty list"),
        ("[jax, torch]", "jax", "3:12: expected a list, got 'jax'"),
        ("[jax, torch]", "[[jax]]", "3:13: expected text, got a list"),
        ("[jax, torch]", "[jax, ~]", "3:18: expected text, got nothing"),
        ("[jax, torch]", "[jax, '']", "3:18: expected a name, got nothing"),
        ("[digits]", "[a/b]", "2:14: a name cannot contain '/', got 'a/b'"),
        ("[digits]", "[a=b]", "2:14: a name cannot contain '=', got 'a=b'"),
        ("[digits]", "['a,b']", "2:14: a name cannot contain ',', got 'a,b'"),
        ("[digits]", "['a|b']", "2:14: a name cannot contain '|', got 'a|b'"),
        ("[digits]", "[a b]", "2:14: a name cannot contain ' ', got 'a b'"),
        ("[digits]", '["a\\tb"]', "2:14: a name cannot contain '\\t', got 'a b'"),
        ("[digits]", '["a\\u202eb"]', "2:14: a name cannot contain '\\u202e', got 'a b'"),
        ("[digits]", "[..]", "2:14: '..' cannot be a name"),
        ("[digits]", "[--help]", "2:14: '--help' cannot be a name"),
        ("[digits]", f"[{'x' * 101}]", f"2:14: the name '{'x' * 57}...' is longer than 100 characters"),
        ("layout: [single]", "layout: [dp2]", "5:12: unknown layout 'dp2': valid: single"),
        ("  layout: [single]\n", "", "2:3: the key 'layout' is missing"),
    ],
)
def test_a_mistake_in_the_matrix_is_told_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert refusal(tmp_path, MATRIX.replace(old, new)) == message


def test_several_mistakes_are_told_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert refusal(tmp_path, MATRIX + "layouts: {a: {nodes: x}}\nrun: {steps: 0, timeout: z}\n").splitlines() == [
        "6:22: expected a whole number, got 'x'",
        "7:14: expected a positive number, got 0",
        "7:26: expected a number, got 'z'",
    ]


def test_of_many_mistakes_the_first_five_are_told(tmp_path: Path) -> None:
    layouts = "".join(f"  l{i}: {{nodes: x}}\n" for i in range(40))
    lines = refusal(tmp_path, MATRIX + "layouts:\n" + layouts).splitlines()
    assert lines[0] == "7:15: expected a whole number, got 'x'"
    assert lines[4:] == ["11:15: expected a whole number, got 'x'", "and 35 more"]


def test_matchers_are_bounded(tmp_path: Path) -> None:
    text = MATRIX + "exclude:\n" + "  - {backend: jax}\n" * 1001
    assert refusal(tmp_path, text) == "7:3: expected at most 1000 entries, got more"


def test_a_cause_must_be_one_that_the_tool_can_find(tmp_path: Path) -> None:
    text = MATRIX + "expect: [{match: {backend: jax}, cause: wrong-results, reason: r}]\n"
    assert refusal(tmp_path, text) == "6:41: unknown cause 'wrong-results': did you mean 'wrong-result'?"


def test_a_workload_that_is_not_in_the_matrix_may_be_matched(tmp_path: Path) -> None:
    text = MATRIX + "expect: [{match: {workload: resnet}, cause: hang, reason: r}]\n"
    assert load(write(tmp_path, text)).expect[0].match == {"workload": ("resnet",)}


def test_the_shipped_definitions_load() -> None:
    assert definition.shipped() == ["absent", "cpu", "nightly", "smoke", "xla"]
    assert [load(name).name for name in definition.shipped()] == ["absent", "cpu", "nightly", "smoke", "xla"]


def test_a_folder_or_file_named_like_a_shipped_definition_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "smoke").write_text("no definition")
    monkeypatch.chdir(tmp_path)
    assert load("cpu").path == definition.SHIPPED / "cpu.yaml"
    assert load("smoke").path == definition.SHIPPED / "smoke.yaml"
    with pytest.raises(UsageError, match=r"^cpu: this is a folder"):
        load("./cpu")


def test_a_file_without_a_folder_in_its_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, MATRIX)
    monkeypatch.chdir(tmp_path)
    loaded = load("mine.yaml")
    assert loaded.path == tmp_path / "mine.yaml"
    assert loaded.folder == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nihgtly",
            "there is no definition 'nihgtly': did you mean 'nightly'? "
            "(shipped: absent, cpu, nightly, smoke, xla; others are given by their path)",
        ),
        (
            "cpu.yaml",
            "there is no definition 'cpu.yaml': did you mean 'cpu'? "
            "(shipped: absent, cpu, nightly, smoke, xla; others are given by their path)",
        ),
        (
            "xyzzy",
            "there is no definition 'xyzzy': shipped: absent, cpu, nightly, smoke, xla; others are given by their path",
        ),
        ("some/where.yaml", "some/where.yaml: there is no such file"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_and_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        load(name)
    assert str(caught.value) == message


def test_the_schema_for_editors_is_current_and_the_shipped_definitions_name_it() -> None:
    schema = json.loads((definition.SHIPPED / "schema.json").read_text())
    assert schema == definition.json_schema(), "write `portmatrix schema` to matrix/definitions/schema.json"
    for name in definition.shipped():
        first = (definition.SHIPPED / f"{name}.yaml").read_text().splitlines()[0]
        reference = first.removeprefix("# yaml-language-server: $schema=")
        assert (definition.SHIPPED / reference).samefile(definition.SHIPPED / "schema.json")


def test_the_schema_describes_every_key() -> None:
    schema = definition.json_schema()
    for model in [schema, *schema["$defs"].values()]:
        described = model["anyOf"][-1] if "anyOf" in model else model  # a target may also be a bare name
        for name, key in described["properties"].items():
            assert key.get("description"), name


def test_a_definition_made_without_a_file_has_errors_without_a_place() -> None:
    made = Definition.model_validate(
        {"matrix": {"workload": ["w"], "backend": ["jax"], "accelerator": ["cpu"], "layout": ["single"]}}
    )
    assert str(made.error("odd", ("matrix",))) == "odd"
    assert made.name == "definition"


def test_a_definition_given_by_a_path_with_dots_is_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, MATRIX)
    (tmp_path / "below").mkdir()
    assert load(tmp_path / "below" / ".." / path.name).path == path
