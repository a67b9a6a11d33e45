"""What a PyTorch/XLA script shows without its chip: every graph that it runs is captured, and compiled elsewhere."""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from matrix import environments, runner
from matrix.attempt import Context
from matrix.backends import INSIDE, available
from matrix.environments import Compiler
from matrix.evidence import Shown, Work, jax, torch_xla
from matrix.journal import AttemptRecord, Compiled, Function
from tests.matrix.harness import DIGITS, Bench, interpreter
from tests.matrix.test_xla import PORT, SPMD, needs_xla
from tests.matrix.variants import Edits, workload, written

COMPILERS = "PORTMATRIX_JAX_TPU"
"""Names an interpreter that has jax[tpu]."""
CAPTURE = runpy.run_path(str(INSIDE / "capture_xla.py"))
MAGIC = b"ML\xefR"  # MLIR bytecode, of which a portable artifact is made


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[list[jax.Artifact]]:
    """In place of the other chips' compilers: what they were given."""
    given: list[list[jax.Artifact]] = []

    def compile_artifacts(work: Work, artifacts: Sequence[jax.Artifact], devices: int, recompiles: int) -> Shown:
        given.append(list(artifacts))
        functions = [Function(name=each.name, calls=each.calls, devices=devices) for each in artifacts]
        return Shown("pass", "compiled", compiled=Compiled(functions=functions, recompiles=recompiles))

    monkeypatch.setattr(torch_xla.jax, "compile_artifacts", compile_artifacts)
    return given


def shown(
    bench: Bench, text: str, backend: str = "torch-xla", layout: str = "single", reference: bool = True
) -> AttemptRecord:
    """The last record of a script's cell on a TPU that is not here."""
    bench.settings["evidence"] = {"tpu": ["v5e:2x2"]}
    workload(bench, "variant", "torch", text, reference=reference)
    cell = bench.cell("variant", backend, layout, "tpu", log_every=1)
    cell = replace(cell, accelerator=replace(cell.accelerator, absent=lambda: "no TPU: in a test"))
    compiler = environments.Interpreter("python", packages={"jax": "0", "libtpu": "0"})
    if COMPILERS in os.environ:
        chosen = {"jax-tpu": os.environ[COMPILERS]}
        found = environments.find([], chosen, None, [Compiler(available()["jax"], "jax-tpu", ("libtpu",))])
        compiler = found["jax-tpu"]
    interpreters = {backend: interpreter(backend), "jax-tpu": compiler}
    context = Context("run", "machine", bench.folder / "run", interpreters, environments.host())
    return list(runner.correctness(context, cell))[-1]


@needs_xla
@pytest.mark.parametrize(("script", "layout", "devices"), [(PORT, "single", 1), (SPMD, "dp2", 2)])
def test_the_first_step_and_the_others_are_a_graph_each(
    bench: Bench, captured: list[list[jax.Artifact]], script: Path, layout: str, devices: int
) -> None:
    record = shown(bench, written(script), layout=layout)
    assert (record.outcome, record.evidence, record.reason) == ("pass", "compiled", None), record.failure
    assert record.compiled
    assert [(each.name, each.calls, each.devices) for each in record.compiled.functions] == [
        ("step graph 1", 1, devices),
        ("step graph 2", 5, devices),
    ]
    assert record.compiled.recompiles == 0
    assert record.compiled.notes == ["left to the host's CPU: aten::_local_scalar_dense 7x"]
    assert all(each.path.read_bytes().startswith(MAGIC) for each in captured[0])


SHRINKING: Edits = (
    (
        "    x, y = images[batch].to(device), labels[batch].to(device)\n",
        """
        |    batch = batch[: BATCH - step]
        |    x, y = images[batch].to(device), labels[batch].to(device)
        |""",
    ),
)


@needs_xla
def test_a_batch_of_another_size_at_every_step_is_a_recompilation(
    bench: Bench, captured: list[list[jax.Artifact]]
) -> None:
    record = shown(bench, written(PORT, *SHRINKING), reference=False)
    assert record.compiled, record.reason
    assert len(record.compiled.functions) == 6
    assert record.compiled.recompiles == 4


@needs_xla
def test_the_graphs_of_openxla_are_captured_with_the_optimizers(
    bench: Bench, captured: list[list[jax.Artifact]]
) -> None:
    record = shown(bench, written(PORT), "torch-xla-compile")
    assert record.compiled, record.reason
    names = {each.name: each.calls for each in record.compiled.functions}
    assert {name.partition(" ")[0] for name in names} == {"compiled", "step"}
    assert sum(calls for name, calls in names.items() if name.startswith("compiled")) >= 12  # forward and backward


FAILS = {
    "a script that ignores XLA": (
        DIGITS / "torch" / "train.py",
        (),
        "on the host, wrong-device: the cell's device is cpu through xla",
    ),
    "wrong numbers": (PORT, (("LEARNING_RATE = 0.05", "LEARNING_RATE = 0.06"),), "on the host, wrong-result: step 2"),
    "an exception": (
        PORT,
        (("logged = 0\n", "raise ValueError('no')\n"),),
        "on the host, exception: ValueError: no",
    ),
}


@needs_xla
@pytest.mark.parametrize("name", FAILS)
def test_what_fails_on_the_host_is_not_compiled_for_other_chips(
    bench: Bench, captured: list[list[jax.Artifact]], name: str
) -> None:
    script, edits, reason = FAILS[name]
    record = shown(bench, written(script, *edits))
    assert (record.outcome, record.evidence, captured) == ("fail", "none", []), record.reason
    assert record.reason
    assert record.reason.startswith(reason)


def test_an_unknown_version_is_left_alone() -> None:
    said = []
    observer = CAPTURE["Observer"](lambda name, then: None)
    observer.emit = lambda event, **fields: said.append((event, fields["reason"]))
    observer.install_xla(SimpleNamespace(__version__="3.0.0+cpu", _XLAC=None))
    assert said == [("unable", "not verified with torch_xla 3.0.0 (but with 2.9.0)")]


@needs_xla
@pytest.mark.skipif(
    COMPILERS not in os.environ, reason=f"no libtpu here: name an interpreter with jax[tpu] in {COMPILERS}"
)
@pytest.mark.parametrize(("script", "layout"), [(PORT, "single"), (SPMD, "dp2")])
def test_the_graphs_are_compiled_for_a_tpu(bench: Bench, script: Path, layout: str) -> None:
    record = shown(bench, written(script), layout=layout)
    assert (record.outcome, record.evidence, record.reason) == ("pass", "compiled", None), record.failure
    assert record.target
    assert record.target.kind == "TPU v5 lite"
    assert record.compiled
    steady = record.compiled.functions[-1]
    assert (steady.collectives.get("all-reduce", 0) > 0) == (layout == "dp2")
    assert steady.flops
    assert steady.flops < (7e6 if layout == "dp2" else 14e6)  # half of it on each of two devices
