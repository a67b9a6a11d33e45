"""What every shipped script promises: the trajectory of the reference, in the usual words."""

import ast
import re
import sys

import pytest

WORKLOADS = ["digits", "resnet", "gpt"]
BASELINES = [(workload, framework) for workload in WORKLOADS for framework in ("torch", "jax")]
PORTS = [
    "digits/torch/ddp.py",
    "digits/jax/sharded.py",
    "digits-cuda/torch/ddp.py",
    "resnet/torch/ddp_sync_stats.py",
    "resnet/jax/sharded.py",
    "gpt/torch/ddp.py",
    "gpt/jax/sharded.py",
    "gpt/jax/mesh.py",
]
EXACT = ("--steps=12", "--dtype=float64", "--log-every=1")
SHORT = ("--steps=30", "--dtype=float32", "--log-every=1")


@pytest.mark.parametrize(("workload", "framework"), BASELINES)
def test_a_baseline_follows_the_reference_in_float64(scripts, deviation, workload, framework):
    found = scripts.run(f"{workload}/{framework}/train.py", *EXACT)
    assert list(found) == [str(step) for step in range(1, 13)] + ["eval"]
    assert deviation(found, scripts.reference(workload)) < 1e-9


@pytest.mark.parametrize("workload", WORKLOADS)
def test_twins_agree_on_the_held_out_data(scripts, workload):
    of_torch = scripts.run(f"{workload}/torch/train.py", *EXACT)
    of_jax = scripts.run(f"{workload}/jax/train.py", *EXACT)
    assert of_jax["eval"] == pytest.approx(of_torch["eval"], rel=1e-9, abs=0)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_twins_agree_for_the_other_size_and_seed(scripts, workload):
    flags = ("--steps=1", "--size=small", "--seed=1", "--dtype=float64", "--log-every=1")
    of_torch = scripts.run(f"{workload}/torch/train.py", *flags)
    of_jax = scripts.run(f"{workload}/jax/train.py", *flags)
    assert of_jax == pytest.approx(of_torch, rel=1e-9, abs=0)
    assert of_jax["1"] != pytest.approx(scripts.reference(workload)["1"], rel=1e-6)


@pytest.mark.parametrize("script", PORTS)
def test_a_port_on_two_devices_follows_the_reference_in_float64(scripts, deviation, script):
    workload = script.partition("/")[0]
    found = scripts.run(script, *EXACT, devices=2)
    assert deviation(found, scripts.reference(workload)) < 1e-9
    if workload != "digits-cuda":
        alone = scripts.run(f"{workload}/torch/train.py", *EXACT)
        assert found["eval"] == pytest.approx(alone["eval"], rel=1e-9, abs=0)


@pytest.mark.parametrize(("workload", "framework"), BASELINES)
def test_float32_is_inside_its_tolerance(scripts, deviation, workload, framework):
    found, reference = scripts.run(f"{workload}/{framework}/train.py", *SHORT), scripts.reference(workload)
    tolerance = scripts.tolerance(workload, "ieee-f32")
    assert deviation(found, reference) < tolerance
    assert found["eval"] == pytest.approx(reference["eval@30"], rel=tolerance, abs=0)


@pytest.mark.parametrize(("workload", "framework"), BASELINES)
def test_bfloat16_is_inside_its_tolerance_and_outside_that_of_float32(scripts, deviation, workload, framework):
    found = scripts.run(f"{workload}/{framework}/train.py", "--steps=30", "--dtype=bfloat16", "--log-every=1")
    reference, tolerance = scripts.reference(workload), scripts.tolerance(workload, "bf16")
    assert scripts.tolerance(workload, "ieee-f32") < deviation(found, reference) < tolerance
    assert found["eval"] == pytest.approx(reference["eval@30"], rel=tolerance, abs=0)


@pytest.mark.parametrize(("workload", "framework"), BASELINES)
def test_a_learning_rate_that_is_one_percent_off_is_far_outside(scripts, deviation, tmp_path, workload, framework):
    edited = copy(scripts, tmp_path, workload, framework, r"^(LEARNING_RATE = )(.*)", r"\g<1>1.01 * \2")
    off = deviation(scripts.run(edited, *SHORT), scripts.reference(workload))
    assert off > 30 * scripts.tolerance(workload, "ieee-f32")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_forgotten_zero_grad_is_far_outside(scripts, deviation, tmp_path, workload):
    edited = copy(scripts, tmp_path, workload, "torch", r"^    optimizer\.zero_grad\(\)\n", "")
    off = deviation(scripts.run(edited, *SHORT), scripts.reference(workload))
    assert off > 100 * scripts.tolerance(workload, "ieee-f32")


def copy(scripts, folder, workload, framework, pattern, replacement):
    """A copy of a workload's baseline with one line edited, beside the same data."""
    text = (scripts.folder(workload) / framework / "train.py").read_text()
    edited, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    assert count == 1, f"{pattern} is in the script {count} times"
    script = folder / framework / "train.py"
    script.parent.mkdir()
    script.write_text(edited)
    (folder / "data").symlink_to(scripts.folder(workload) / "data")
    return script


@pytest.mark.parametrize(("workload", "framework"), BASELINES)
def test_a_line_counts_what_was_trained_on_since_the_line_before(scripts, workload, framework):
    printed = scripts.output(f"{workload}/{framework}/train.py", "--steps=10", "--log-every=4")
    unit, batch = {"digits": ("examples", 96), "resnet": ("examples", 96), "gpt": ("tokens", 24 * 40)}[workload]
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in printed.splitlines()]
    assert [(int(line["step"]), int(line[unit])) for line in lines[:-1]] == [
        (1, batch), (4, 3 * batch), (8, 4 * batch), (10, 2 * batch),
    ]  # fmt: skip
    assert list(lines[-1]) == ["eval"]


@pytest.mark.parametrize("path", [*PORTS, *(f"{workload}/{framework}/train.py" for workload, framework in BASELINES)])
def test_a_script_imports_the_standard_library_its_framework_and_numpy_only(scripts, path):
    workload, framework, _ = path.split("/")
    tree = ast.parse((scripts.folder(workload) / framework / path.split("/")[-1]).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"torch": {"torch", "numpy"}, "jax": {"jax", "equinox", "optax", "numpy"}}[framework]
    assert {name.partition(".")[0] for name in imported} <= allowed | sys.stdlib_module_names
