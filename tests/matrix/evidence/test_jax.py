"""JAX for chips that are not here: scripts as people write them, lowered here, and compiled where the compilers are.

`PORTMATRIX_JAX_TPU` and `PORTMATRIX_JAX_CUDA` name interpreters that have libtpu, and JAX's CUDA plug-in; without them
the tests that need a compiler are skipped.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from matrix import accelerators, environments, evidence
from matrix.attempt import Context
from matrix.backends import INSIDE
from matrix.backends import jax as backend
from matrix.environments import Compiler
from matrix.evidence import Work, stage
from matrix.evidence.jax import PACKAGES, PRODUCERS, Artifact, compile_artifacts
from matrix.evidence.targets import GPUS
from matrix.journal import AttemptRecord, Function
from tests.matrix.harness import Bench

jax = pytest.importorskip("jax")
pytest.importorskip("equinox")

HEAD = """
import functools
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import jit
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
"""
LINES = """
for step in (1, 2, 3):
    print(f"step={step} loss=1.0 examples=8", flush=True)
"""
STEP = """
@jit
def step(w, x):
    return w - 0.1 * x.T @ (x @ w)
w = step(jnp.ones((16, 16)), np.ones((8, 16), np.float32))
"""


def interpreter(accelerator: str) -> str | None:
    """One that has the accelerator's compiler."""
    return os.environ.get(f"PORTMATRIX_JAX_{accelerator.upper()}")


@functools.cache
def found(accelerator: str, path: str) -> dict[str, environments.Interpreter]:
    compiler = Compiler(backend.BACKEND, f"jax-{accelerator}", PACKAGES.get(accelerator, ()))
    return environments.find([backend.BACKEND], {compiler.name: path}, {}, [compiler])


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[AttemptRecord]]:
    """Show a script, or a shipped workload, for a target: `shown(text, "rocm", "any")`."""

    def show(
        text: str, accelerator: str = "rocm", target: object = "any", layout: str = "single", **settings: object
    ) -> list[AttemptRecord]:
        path = interpreter(accelerator) if target != "any" else sys.executable
        if path is None:
            pytest.skip(f"PORTMATRIX_JAX_{accelerator.upper()} is not set")
        absent = accelerators.available()[accelerator].absent
        if absent() is None:
            pytest.skip(f"this machine has a {accelerator}")
        bench = Bench(tmp_path, {"evidence": {accelerator: [target]}, **settings})
        if text not in ("gpt", "digits"):
            bench.workload("made", {"train.py": HEAD + text + LINES}, {"jax": {"baseline": {"file": "train.py"}}})
        cell = bench.cell(text if text in ("gpt", "digits") else "made", "jax", layout, accelerator, steps=3)
        known = found(accelerator, path)
        context = Context("run", "machine", tmp_path / "results" / "run", known, environments.host())
        bench.last = cell, context  # type: ignore[attr-defined]
        from matrix import runner

        return list(runner.correctness(context, cell))

    return show


def functions(attempts: list[AttemptRecord]) -> list[Function]:
    (attempt,) = attempts
    assert attempt.outcome == "pass", (attempt.reason, attempt.failure)
    assert attempt.compiled is not None
    return attempt.compiled.functions


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("f = jit(lambda w: w @ w)\nf(jnp.ones((8, 8)))", ["<lambda>"]),
        ("@functools.partial(jax.jit, static_argnums=1)\ndef f(w, n): return w @ w * n\nf(jnp.ones((8, 8)), 3)", ["f"]),
        ("@jax.jit(static_argnames='n')\ndef f(w, n): return w @ w * n\nf(jnp.ones((8, 8)), n=3)", ["f"]),
        ("@jit\ndef g(w): return w @ w\n@jit\ndef f(w): return g(w) + g(w)\nf(jnp.ones((8, 8)))", ["f"]),
        ("@eqx.filter_jit(donate='all')\ndef f(w): return {'w': w['w'] @ w['w']}\nf({'w': jnp.ones((8, 8))})", ["f"]),
        (
            "class Model:\n  w = jnp.ones((8, 8))\n  @functools.partial(jit, static_argnums=0)\n"
            "  def f(self, x): return x @ self.w\nModel().f(jnp.ones((8, 8)))",
            ["f"],
        ),
        ("w = jnp.ones((8, 8))\nassert jit(lambda w: w @ w).lower(w).compile()(w).shape == (8, 8)", ["<lambda>"]),
        (
            "f = jit(lambda k, w: (jax.random.clone(k), w @ w))\nf(*f(jax.random.key(0), jnp.ones((8, 8))))",
            ["<lambda>"],
        ),
    ],
    ids=["name", "static numbers", "static names", "nested", "equinox", "method", "ahead of time", "keys"],
)
def test_what_a_script_jits_is_found(shown: Callable[..., list[AttemptRecord]], text: str, names: list[str]) -> None:
    assert [each.name for each in functions(shown(text))] == names


def test_new_shapes_are_recompilations_and_calls_are_counted(shown: Callable[..., list[AttemptRecord]]) -> None:
    text = "f = jit(lambda w: w @ w)\nfor n in (8, 8, 9, 8): f(jnp.ones((n, n)))\n"
    attempts = shown(text)
    assert [each.calls for each in functions(attempts)] == [3, 1]
    assert attempts[0].compiled is not None
    assert attempts[0].compiled.recompiles == 1
    assert attempts[0].evidence == "lowered"


def test_a_function_that_is_made_anew_in_every_step_is_recompiled_in_every_step(
    shown: Callable[..., list[AttemptRecord]],
) -> None:
    (attempt,) = shown("for n in range(3): jit(lambda w: w @ w + n)(jnp.ones((8, 8)))\n")
    assert attempt.compiled is not None
    assert attempt.compiled.recompiles == 2


@pytest.mark.parametrize("target", [("rocm", "any"), ("tpu", "v5e:2x2")])
def test_results_are_not_computed_but_have_their_shapes_and_shardings(
    shown: Callable[..., list[AttemptRecord]], target: tuple[str, str]
) -> None:
    text = """
mesh = Mesh(np.array(jax.devices()), ("d",))
x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("d")))
@jit
def step(w, x): return w - x.T @ (x @ w), (x @ w).sum(1), jnp.int32(7)
w = jax.device_put(np.full((16, 16), 3.0, np.float32), NamedSharding(mesh, P()))
w, y, n = step(w, x)
assert (w.shape, y.shape, n.shape) == ((16, 16), (8,), ()), (w, y, n)
assert float(w[0, 0]) == 3.0 and float(y[0]) == 1.0 and int(n) == 0, (w, y, n)
assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 1), y.sharding  # nobody but a compiler says so
w, y, n = step(w, x)
"""
    (attempt,) = shown(text, *target, "dp2")
    assert attempt.outcome == "pass", (attempt.reason, attempt.failure)


def test_equal_parameters_stay_two_whatever_is_laid_out_otherwise(
    shown: Callable[..., list[AttemptRecord]],
) -> None:
    text = """
mesh = Mesh(np.array(jax.devices()), ("d",))
split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
x = jax.device_put(np.full((8, 8), 5.0, np.float32), split)
a, b = (jax.device_put(np.full((8, 8), value, np.float32), whole) for value in (2.0, 3.0))
@functools.partial(jit, out_shardings=(whole, whole))
def step(x, a, b): return a - x.T @ x, b - x.T @ x
a, b = step(x, a, b)
assert a is not b and (float(a[0, 0]), float(b[0, 0])) == (2.0, 3.0), (a, b)
"""
    (attempt,) = shown(text, "tpu", "v5e:2x2", "dp2")
    assert attempt.outcome == "pass", (attempt.reason, attempt.failure)


def test_a_mesh_that_is_set_for_a_block_and_explicit_axes_are_followed(
    shown: Callable[..., list[AttemptRecord]],
) -> None:
    text = """
mesh = jax.make_mesh((2,), ("d",))
x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("d", None)))
w = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P(None, None)))
with jax.set_mesh(mesh):
    y = jit(lambda w, x: jnp.sin(x @ w))(w, x)
assert y.sharding.spec[0] == "d", y.sharding
auto = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
@jit
@functools.partial(jax.shard_map, mesh=auto, in_specs=(P(), P("d")), out_specs=P())
def step(w, x): return w - jax.lax.pmean(x.T @ (x @ w), "d")
w = step(np.ones((16, 16), np.float32), jax.device_put(np.ones((8, 16), np.float32), NamedSharding(auto, P("d"))))
"""
    (attempt,) = shown(text, "tpu", "v5e:2x2", "dp2")
    assert attempt.compiled is not None, (attempt.reason, attempt.failure)
    assert [(each.name, each.devices, each.collectives) for each in attempt.compiled.functions] == [
        ("<lambda>", 2, {}),
        ("step", 2, {"all-reduce": 1}),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("w = jnp.ones((8, 8)) @ jnp.ones((8, 8))", "nothing was compiled: it calls no jitted function"),
        ("jax.pmap(lambda x: x + 1)(jnp.ones((1, 8)))", "jax.pmap is not followed"),
        (
            "jit(lambda x: x)(1.0); jnp.ones((64, 64)) @ jnp.ones((64, 64))",
            "most of the work is done outside of jitted",
        ),
        (
            "jit(lambda x: (jax.debug.callback(print, x), x @ x)[1])(jnp.ones((8, 8)))",
            "cannot be compiled here: ValueError: the platform",
        ),
    ],
    ids=["eager", "pmap", "mostly eager", "callback"],
)
def test_what_is_not_followed_is_said_and_shows_nothing(
    shown: Callable[..., list[AttemptRecord]], text: str, why: str
) -> None:
    (attempt,) = shown(text)
    assert (attempt.outcome, attempt.evidence) == ("unavailable", "none")
    assert why in (attempt.reason or "")


def test_an_error_of_the_script_is_its_own(shown: Callable[..., list[AttemptRecord]]) -> None:
    (attempt,) = shown("jit(lambda x: x @ jnp.ones((3, 3)))(jnp.ones((8, 8)))")
    assert (attempt.outcome, attempt.evidence) == ("fail", "none")
    assert attempt.failure is not None
    assert attempt.failure.cause == "shape"


def test_a_version_that_was_not_tried_is_not_trusted(
    shown: Callable[..., list[AttemptRecord]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("compile_jax.py", "observe_jax.py", "chips_jax.py"):
        text = (INSIDE / file).read_text()
        (tmp_path / file).write_text(re.sub(r"^VERIFIED = .*$", 'VERIFIED = ("0.1.0",)', text, flags=re.MULTILINE))
    (producer,) = [each for each in PRODUCERS if each.evidence == "lowered"]
    elsewhere = replace(producer, observer=tmp_path / "compile_jax.py")
    monkeypatch.setattr(evidence, "available", lambda: (elsewhere,))
    (attempt,) = shown(STEP)
    assert (attempt.outcome, attempt.evidence) == ("unavailable", "none")
    assert attempt.reason == f"not verified with jax {jax.__version__} (but with 0.1.0)"


CHIPS = runpy.run_path(str(INSIDE / "chips_jax.py"))
SAID = {  # by the compilers for TPUs and NVIDIA GPUs of jax 0.10.2, when they were made to
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (37.26G)": True,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 128.00M": True,
    "INVALID_ARGUMENT: during context [pre-optimization]: Unexpected operand type for FFT: c128[8,128]{1,0}": True,
    "INTERNAL: ptxas exited with non-zero error code 65280, output: ptxas /tmp/x.ptx, line 5; error   : Entry function "
    "f uses too much shared data (0x1000 bytes, 0xc000 max)": True,
    "RESOURCE_EXHAUSTED: /var/tmp/tempfile-vm-b0222d33; No space left on device\n\tUnable to write PTX contents": False,
    "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor nvjtlink is available.": False,
    "UNIMPLEMENTED: /usr/bin/ptxas ptxas too old. Falling back to the driver to compile.": False,
    "INTERNAL: libdevice not found at ./libdevice.10.bc": False,
    "INTERNAL: ptxas exited with non-zero error code 9, output: ": False,
    "INTERNAL: ptxas exited with non-zero error code 65280, output: ptxas fatal   : Memory allocation failure": False,
    "RESOURCE_EXHAUSTED: Out of memory allocating 320000000000 bytes.": False,
    "DEADLINE_EXCEEDED: no answer": False,
}


@pytest.mark.parametrize("words", SAID)
def test_only_what_speaks_of_the_program_is_a_refusal(words: str) -> None:
    error = jax.errors.JaxRuntimeError(words)
    assert CHIPS["is_refusal"](error) == SAID[words]
    told = []
    kind = CHIPS["Refused"](words) if SAID[words] else error
    CHIPS["told"](lambda event, **fields: told.append((event, *fields.values())), "step", kind)
    first = words.splitlines()[0]
    unable = ("unable", f"step cannot be compiled here: JaxRuntimeError: {first}")
    assert told == [("refused", "step", words) if SAID[words] else unable]


def test_what_was_compiled_is_kept_by_program_chip_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    compiler = CHIPS["Compiler"].__new__(CHIPS["Compiler"])
    compiler.task = {"cache": str(tmp_path), "target": {"name": "h100"}}
    compiler.emit, compiler.done = lambda event, **fields: None, {}
    compiler.chips = SimpleNamespace(slices=1, config="a chip", compiler="jax 0", kind="")

    def compiles() -> bool:
        before = len(made)
        compiler.compile("step", b"program", 1, lambda: (made.append(1), None))
        return len(made) > before

    assert [compiles(), compiles()] == [True, False]
    compiler.chips.config = "a chip with less memory"
    assert [compiles(), compiles()] == [True, False]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert [compiles(), compiles()] == [True, False]
    with jax.numpy_dtype_promotion("strict"):
        assert [compiles(), compiles()] == [True, False]


# --- with the compilers ---


@pytest.mark.parametrize(("accelerator", "target"), [("tpu", "v5e:2x2"), ("cuda", "h100")])
def test_a_shipped_workload_is_compiled(
    shown: Callable[..., list[AttemptRecord]], accelerator: str, target: str
) -> None:
    attempts = shown("digits", accelerator, target, "dp2")
    assert [(each.source, each.outcome, each.evidence) for each in attempts] == [
        ("jax/train.py", "fail", "none"),
        ("jax/sharded.py", "pass", "compiled"),
    ]
    (idle, sharded) = attempts
    assert idle.failure is not None
    assert idle.failure.cause == "idle-devices"
    assert sharded.compiled is not None
    step = sharded.compiled.functions[0]
    assert (step.name, step.devices, step.collectives) == ("train_step", 2, {"all-reduce": 1})
    assert (step.peak_bytes or 0) > (step.argument_bytes or 0) > 100_000  # 23,000 float32 parameters and a batch
    assert 1e6 < (step.flops or 0) < 1e8
    assert sharded.target is not None
    assert sharded.target.compiler.startswith("jax 0.10.2, ")


@pytest.mark.parametrize(
    ("accelerator", "target", "layout", "collective"),
    [
        ("tpu", "v5e:2x2", "fsdp2", "all-gather"),
        ("tpu", "v5e:2x2", "tp2", "all-reduce"),
        ("cuda", "h100", "fsdp2", "all-gather"),
    ],
)
def test_one_source_is_fully_sharded_and_tensor_parallel(
    shown: Callable[..., list[AttemptRecord]], accelerator: str, target: str, layout: str, collective: str
) -> None:
    attempts = shown("gpt", accelerator, target, layout)
    assert [(each.source, each.outcome) for each in attempts] == [("jax/train.py", "fail"), ("jax/mesh.py", "pass")]
    assert attempts[1].compiled is not None
    assert attempts[1].compiled.functions[0].collectives[collective] >= 1  # a compiler may combine them


@pytest.mark.parametrize("target", sorted(each.stem for each in GPUS.glob("*.txtpb")))
def test_the_compiler_takes_the_description_of_every_shipped_gpu(
    shown: Callable[..., list[AttemptRecord]], target: str
) -> None:
    (attempt,) = shown(STEP, "cuda", target)
    assert (attempt.outcome, attempt.evidence) == ("pass", "compiled"), (attempt.reason, attempt.failure)
    assert attempt.target is not None
    assert attempt.target.kind == attempt.target.about


LARGE = """
x = jax.ShapeDtypeStruct((200_000, 50_000), jnp.float32)  # 37 GiB
jit(lambda x: jnp.sin(x) @ jnp.cos(x).T[:, :8]).lower(x).compile()
"""


@pytest.mark.parametrize(
    ("accelerator", "target", "figures"),
    [
        ("tpu", "v5e:2x2", ("G) exceeds", "15.75G")),
        ("cuda", "rtx4090", ("GiB of device memory", "has 24.00 GiB")),
    ],
)
def test_what_does_not_fit_is_out_of_memory_with_both_figures(
    shown: Callable[..., list[AttemptRecord]], accelerator: str, target: str, figures: tuple[str, str]
) -> None:
    (attempt,) = shown(LARGE, accelerator, target)
    assert (attempt.outcome, attempt.evidence) == ("fail", "compiled")
    assert attempt.failure is not None
    assert attempt.failure.cause == "out-of-memory-device"
    assert all(each in attempt.failure.message for each in figures), attempt.failure.message


def test_a_kernel_that_the_compiler_refuses_is_refused_at_the_line_that_calls_it(
    shown: Callable[..., list[AttemptRecord]],
) -> None:
    text = """
from jax.experimental import pallas as pl
def kernel(x, y): y[...] = jnp.sort(x[...])
f = jit(lambda x: pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
f(jnp.ones((8, 128)))
"""
    (attempt,) = shown(text, "tpu", "v5e:2x2")
    assert (attempt.outcome, attempt.evidence) == ("fail", "compiled")
    assert attempt.failure is not None
    assert attempt.failure.cause in ("unsupported-op", "compile-error")
    assert "sort" in attempt.failure.message
    assert attempt.failure.frame == "train.py:13"


def test_a_kernel_that_only_the_chip_has_is_compiled(shown: Callable[..., list[AttemptRecord]]) -> None:
    text = """
from jax.experimental import pallas as pl
def kernel(x, y): y[...] = x[...] * 2
f = jit(lambda x: pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x) @ jnp.ones((128, 128)))
f(jnp.ones((8, 128)))
"""
    (attempt,) = shown(text, "tpu", "v5e:2x2")
    assert attempt.outcome == "pass", (attempt.reason, attempt.failure)


def test_a_second_run_takes_what_was_compiled_from_the_cache(shown: Callable[..., list[AttemptRecord]]) -> None:
    assert [each.cached for each in functions(shown(STEP, "tpu", "v5e:2x2"))] == [False]
    assert [each.cached for each in functions(shown(STEP, "tpu", "v5e:2x2"))] == [True]


def test_loops_whose_body_is_counted_once_are_said(shown: Callable[..., list[AttemptRecord]]) -> None:
    text = """
@jit
def f(w): return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), w, None, length=50)[0]
f(jnp.ones((256, 256)))
"""
    (one,) = functions(shown(text, "tpu", "v5e:2x2"))
    assert one.scans_counted_once >= 1
    assert (one.flops or 0) < 50 * 2 * 256**3 / 2


@pytest.mark.parametrize("accelerator", ["tpu", "cuda"])
def test_what_another_framework_captured_is_compiled(tmp_path: Path, accelerator: str) -> None:
    path = interpreter(accelerator)
    if path is None:
        pytest.skip(f"PORTMATRIX_JAX_{accelerator.upper()} is not set")
    target = {"tpu": "v5e:2x2", "cuda": "h100"}[accelerator]
    graph = tmp_path / "graph.bc"
    code = "exported = jax.export.export(jit(lambda w: w @ w))(jax.ShapeDtypeStruct((8, 8), jnp.float32))"
    code = f"import jax.export\n{HEAD}{code}\nopen({str(graph)!r}, 'wb').write(exported.mlir_module_serialized)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    bench = Bench(tmp_path, {"evidence": {accelerator: [target]}})
    bench.workload("made", {"train.py": HEAD}, {"jax": {"baseline": {"file": "train.py"}}})
    cell = bench.cell("made", "jax", "single", accelerator, steps=3)
    context = Context("run", "machine", tmp_path / "run", found(accelerator, path), environments.host())
    folder = tmp_path / "attempt"
    folder.mkdir()
    source = cell.sources()[0]
    assert source is not None
    work = Work(context, cell, source, cell.targets[0], folder, 300.0, 8 << 30, "jax")
    result = compile_artifacts(work, [Artifact("step graph", graph, 7)], 1, 0)
    assert (result.outcome, result.evidence) == ("pass", "compiled"), (result.reason, result.failure)
    assert result.compiled is not None
    assert [(each.name, each.calls, each.devices) for each in result.compiled.functions] == [("step graph", 7, 1)]


def test_the_stage_finds_the_interpreter_that_has_the_compiler(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"evidence": {"tpu": ["v5e:2x2"], "rocm": ["any"]}})
    bench.workload("made", {"train.py": HEAD}, {"jax": {"baseline": {"file": "train.py"}}})
    cell = bench.cell("made", "jax", "single", "tpu")
    from matrix import definition, plan

    planned = plan.plan(definition.load(tmp_path / "definition.yaml"))
    if cell.accelerator.absent() is not None:
        assert [(each.name, each.packages) for each in stage.compilers(planned)] == [("jax-tpu", ("libtpu",))]
