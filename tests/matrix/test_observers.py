"""Ordinary scripts in every style are green, and what runs in them is what runs without the observers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix.attempt import WORKER
from matrix.backends import INSIDE
from tests.matrix.harness import DIGITS, Bench
from tests.matrix.variants import (
    DDP,
    JAX,
    JAX_PLACED,
    JAX_STATE,
    JAX_STEP,
    REPEAT,
    SHARDED,
    TORCH,
    TORCH_COMPILE,
    TORCH_PRINT,
    TORCH_STEP,
    Edits,
    attempt,
    explain,
    told,
    written,
)

SILU = "            x = F.silu(layer(x))\n"
COMPILED = "if args.compile:\n    "
TRAIN_STEP = """
    |def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    |    optimizer.zero_grad()
    |    loss = loss_of(x, y)
    |    loss.backward()
    |    optimizer.step()
    |    return loss
    |
    |
    |if args.compile:
    |    train_step = torch.compile(train_step)
    |
    |# --- training ---
    |"""

EAGER: dict[str, Edits] = {
    "gradient accumulation": (
        (
            TORCH_STEP,
            """
            |    optimizer.zero_grad()
            |    loss = torch.zeros(())
            |    for part in range(4):
            |        share = loss_of(x[part::4], y[part::4]) / 4
            |        share.backward()
            |        loss += share.detach()
            |    optimizer.step()
            |""",
        ),
    ),
    "checkpoint": (
        ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
        (SILU, "            x = checkpoint(lambda x, layer=layer: F.silu(layer(x)), x, use_reentrant=False)\n"),
    ),
    "reentrant checkpoint": (
        ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
        (SILU, "            x = checkpoint(lambda x, layer=layer: F.silu(layer(x)), x, use_reentrant=True)\n"),
        ("    loss = loss_of(x, y)\n", "    loss = loss_of(x.requires_grad_(), y)\n"),
    ),
    "torch.func": (
        (
            TORCH_STEP,
            """
            |    gradients, loss = torch.func.grad_and_value(functional_loss)(weights, x, y)
            |    for name in weights:
            |        momenta[name] = MOMENTUM * momenta[name] + gradients[name]
            |        weights[name] = weights[name] - LEARNING_RATE * momenta[name]
            |""",
        ),
        (
            "# --- training ---\n",
            """
            |def functional_loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            |    logits = torch.func.functional_call(model, weights, (x,))
            |    return F.cross_entropy(logits, y, label_smoothing=LABEL_SMOOTHING)
            |
            |
            |weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            |momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            |""",
        ),
        ("with torch.no_grad():\n", "model.load_state_dict(weights)\nwith torch.no_grad():\n"),
        ("optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)\n", ""),
    ),
    "an optimizer by hand": (
        ("optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)\n", ""),
        (
            TORCH_STEP,
            """
            |    loss = loss_of(x, y)
            |    gradients = torch.autograd.grad(loss, list(model.parameters()))
            |    with torch.no_grad():
            |        for parameter, gradient in zip(model.parameters(), gradients):
            |            parameter.momentum = MOMENTUM * getattr(parameter, "momentum", 0.0) + gradient
            |            parameter -= LEARNING_RATE * parameter.momentum
            |""",
        ),
    ),
    "several optimizers": (
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)\n",
            """
            |groups = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
            |weights, biases = (torch.optim.SGD(each, lr=LEARNING_RATE, momentum=MOMENTUM) for each in groups)
            |""",
        ),
        (
            TORCH_STEP,
            """
            |    weights.zero_grad()
            |    biases.zero_grad()
            |    loss = loss_of(x, y)
            |    loss.backward()
            |    weights.step()
            |    biases.step()
            |""",
        ),
    ),
    "logging to standard error": (
        ("# --- training ---\n", "import logging\n\nlogging.basicConfig(level=logging.INFO)\n"),
        (TORCH_PRINT, 'logging.info("step: %d | loss: %.12g | examples: %d", step, loss, (step - logged) * BATCH)'),
    ),
    "colours over a progress bar": (
        (
            TORCH_PRINT,
            r"""
            |        import sys
            |
            |        sys.stderr.write(f"\r{step}/{args.steps} [#####     ]")
            |        print(f"\r\x1b[K\x1b[32mstep={step}\x1b[0m loss=\x1b[1m{loss.item():.12g}\x1b[0m", end="")
            |        print(f" examples={(step - logged) * BATCH}")
            |""".replace("        import sys", "import sys", 1),
        ),
    ),
}  # fmt: skip

COMPILES: dict[str, Edits] = {
    "the model": (),
    "the model's own compile": ((TORCH_COMPILE, f"{COMPILED}model.compile()\n"),),
    "each layer": ((TORCH_COMPILE, f"{COMPILED}model.layers = nn.ModuleList(map(torch.compile, model.layers))\n"),),
    "the loss with the model inside": (
        (TORCH_COMPILE, ""),
        ("# --- training ---\n", f"{COMPILED}loss_of = torch.compile(loss_of)\n"),
    ),
    "the whole step": (
        (TORCH_STEP, "    loss = train_step(x, y)\n"),
        (TORCH_COMPILE, ""),
        ("# --- training ---\n", TRAIN_STEP),
    ),
    "the model and the optimizer": (
        ("# --- training ---\n", f"{COMPILED}update = torch.compile(optimizer.step)\n"),
        ("    optimizer.step()\n", "    update()\n"),
    ),
}

OWN_STEP = """
    |def train_step(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array):
    |    loss, gradients = gradients_of(model, x, y)
    |    updates, state = optimizer.update(gradients, state, model)
    |    return eqx.apply_updates(model, updates), state, loss
    |
    |
    |gradients_of = WRAP(eqx.filter_value_and_grad(loss_of))
    |
    |
    |"""
SCAN = """
    |def body(carry, batch):
    |    model, state = carry
    |    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, *batch)
    |    updates, state = optimizer.update(gradients, state, model)
    |    return (eqx.apply_updates(model, updates), state), loss
    |
    |
    |order = rng.permutation(TRAIN)[: args.steps * BATCH]
    |batches = images[order].reshape(args.steps, BATCH, 64), labels[order].reshape(args.steps, BATCH)
    |train = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))
    |(model, state), losses = train((model, state), batches)
    |for step, loss in enumerate(losses, 1):
    |    print(f"step={step} loss={loss.item():.12g} examples={BATCH}", flush=True)
    |
    |"""
JAX_LOOP = JAX.read_text()[JAX.read_text().index("logged = 0\n") : JAX.read_text().index("held_out")]
STYLES: dict[str, Edits] = {
    "donated": (),
    "jax.jit": (
        (JAX_STEP, JAX_STEP.replace('@eqx.filter_jit(donate="all")', "@jax.jit")),
    ),
    "scan over the steps": ((JAX_LOOP, SCAN),),
    "jit of the gradient only": ((JAX_STEP, OWN_STEP.replace("WRAP", "eqx.filter_jit")),),
    "no jit": (
        (JAX_STEP, OWN_STEP.replace("WRAP", "")),
        ("@eqx.filter_jit\ndef loss_of", "def loss_of"),
    ),
    "evaluation first": (("logged = 0\n", "loss_of(model, images[TRAIN:], labels[TRAIN:])\nlogged = 0\n"),),
}  # fmt: skip


@pytest.mark.parametrize("edits", EAGER.values(), ids=EAGER)
def test_eager_styles_pass(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(TORCH, *edits))
    assert told(record) == ("pass", None), explain(record)
    assert record.precision == "ieee-f32"


@pytest.mark.parametrize("edits", COMPILES.values(), ids=COMPILES)
def test_styles_of_compilation_pass(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(TORCH, *edits), "torch-compile")
    assert told(record) == ("pass", None), explain(record)


@pytest.mark.parametrize("edits", STYLES.values(), ids=STYLES)
def test_jax_styles_pass(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(JAX, *edits), "jax")
    assert told(record) == ("pass", None), explain(record)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_mixed_precision_is_held_to_its_own_tolerance(bench: Bench, backend: str) -> None:
    record = attempt(bench, written(JAX if backend == "jax" else TORCH), backend, dtype="bfloat16")
    assert told(record) == ("pass", None), explain(record)
    assert (record.precision, record.metrics.tolerance) == ("bf16", 1e-2)


@pytest.mark.parametrize("number", range(REPEAT))
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_correct_script_passes_every_time(bench: Bench, backend: str, number: int) -> None:
    record = attempt(bench, written(SHARDED if backend == "jax" else TORCH), backend)
    assert told(record) == ("pass", None), explain(record)


# --- without a gradient, without a reference ---

OWN = {
    "LBFGS": """
        import torch

        torch.manual_seed(0)
        x, y = torch.randn(64, 8), torch.randn(64, 1)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for step in range(1, 7):
            def closure():
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            print(f"step={step} loss={optimizer.step(closure).item()} examples=64", flush=True)
        """,
    "critic and generator": """
        import torch

        torch.manual_seed(0)
        critic, generator = torch.nn.Linear(8, 1), torch.nn.Linear(4, 8)
        ours, theirs = (torch.optim.Adam(each.parameters()) for each in (critic, generator))
        for step in range(1, 7):
            for _ in range(3):
                ours.zero_grad()
                loss = (critic(generator(torch.randn(32, 4)).detach()) - critic(torch.randn(32, 8))).mean()
                loss.backward()
                ours.step()
            theirs.zero_grad()
            (-critic(generator(torch.randn(32, 4))).mean()).backward()
            theirs.step()
            print(f"step={step} loss={loss.item()} examples=32", flush=True)
        """,
    "inference": """
        import sys

        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
        if "--compile" in sys.argv:
            model = torch.compile(model)
        with torch.inference_mode():
            for step in range(1, 7):
                loss = model(torch.randn(16, 64)).square().mean()
                print(f"step={step} loss={loss.item()} examples=16", flush=True)
        """,
}


@pytest.mark.parametrize("name", OWN)
def test_scripts_of_other_kinds_pass(bench: Bench, name: str) -> None:
    record = attempt(bench, OWN[name], reference=False)
    assert told(record) == ("pass", None), explain(record)
    assert record.devices.used == 1


def test_compiled_inference_passes(bench: Bench) -> None:
    record = attempt(bench, OWN["inference"], "torch-compile", reference=False)
    assert told(record) == ("pass", None), explain(record)


def test_inference_that_compiles_something_else_is_not_compiled(bench: Bench) -> None:
    beside = "scaled = torch.compile(lambda x: x * 2)\n            model = lambda x, of=model: scaled(of(x))"
    text = OWN["inference"].replace("model = torch.compile(model)", beside)
    record = attempt(bench, text, "torch-compile", reference=False)
    assert told(record) == ("fail", "not-compiled"), explain(record)


def test_work_that_no_observer_sees_is_the_tools_error(bench: Bench) -> None:
    text = """
        import torch

        w = torch.ones(4, 4)
        for step in range(1, 7):
            w = w @ w / 4
            print(f"step={step} loss={w.mean().item()} examples=4", flush=True)
        """
    record = attempt(bench, text, reference=False)
    assert (record.outcome, record.reason) == (
        "error",
        "no work was seen: no backward pass, no module, no compiled step",
    ), explain(record)


# --- two devices ---

FULLY_SHARD = "from torch.distributed.fsdp import fully_shard\n"
FSDP: Edits = (
    ("import torch.distributed as dist\n", "import torch.distributed as dist\n" + FULLY_SHARD),
    ("model = nn.parallel.DistributedDataParallel(model)\n", "fully_shard(model)\n"),
)  # fmt: skip
TENSOR: Edits = (
    (
        "import torch.distributed as dist\n",
        """
        |import torch.distributed as dist
        |from torch.distributed.device_mesh import init_device_mesh
        |from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        |""",
    ),
    (
        "model = nn.parallel.DistributedDataParallel(model)\n",
        """
        |mesh = init_device_mesh(device.type, (world_size,))
        |parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        |""",
    ),
    ("[rank::world_size]", ""),
)
TWO_RANKS: dict[str, tuple[str, str, Edits]] = {
    "data-parallel": ("torch", "dp2", ()),
    "data-parallel, not counted": ("torch", "dp2", ((" examples={(step - logged) * BATCH}", ""),)),
    "data-parallel, compiled": ("torch-compile", "dp2", ()),
    "fully sharded": ("torch", "fsdp2", FSDP),
    "tensor-parallel": ("torch", "tp2", TENSOR),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_pass(bench: Bench, name: str) -> None:
    backend, layout, edits = TWO_RANKS[name]
    record = attempt(bench, written(DDP, *edits), backend, layout, "torchrun")
    assert told(record) == ("pass", None), explain(record)
    assert record.devices.used == 2


PER_DEVICE = """
    |def train_step(model: MLP, state: optax.OptState, x: list[jax.Array], y: list[jax.Array]):
    |    found = [gradients_of(jax.device_put(model, part.device), part, labels) for part, labels in zip(x, y)]
    |    first = jax.devices()[0]
    |    loss, gradients = jax.tree.map(lambda *each: sum(jax.device_put(e, first) for e in each) / len(each), *found)
    |    updates, state = optimizer.update(gradients, state, model)
    |    return eqx.apply_updates(model, updates), state, loss
    |
    |
    |gradients_of = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
    |
    |
    |"""
PER_DEVICE_SPLIT = """
    |    n = len(jax.devices())
    |    x, y = (list(map(jax.device_put, np.split(each[batch], n), jax.devices())) for each in (images, labels))
    |"""
SHARD_PARAMETERS = (
    JAX_STATE,
    """
    |state = optimizer.init(model)
    |lay = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*["data"][: leaf.ndim])))
    |model, state = jax.tree.map(lay, (model, state))
    |""",
)


def two_devices() -> dict[str, tuple[str, Edits]]:
    from tests.matrix.test_silent_failures import PMAP, PMAP_EVAL, PMAP_SPLIT, SHARD_MAP

    return {
        "jit": ("dp2", ()),
        "shard_map": ("dp2", ((JAX_STEP, SHARD_MAP.replace("BATCH_SPEC", 'PartitionSpec("data")')),)),
        "pmap": ("dp2", ((JAX_STEP, PMAP), (JAX_PLACED, PMAP_SPLIT), PMAP_EVAL)),
        "a loop over devices": (
            "dp2",
            (
                (JAX_STEP, PER_DEVICE),
                (f"    {JAX_PLACED}\n", PER_DEVICE_SPLIT),
            ),
        ),
        "no jit": (
            "dp2",
            ((JAX_STEP, OWN_STEP.replace("WRAP", "")), ("@eqx.filter_jit\ndef loss_of", "def loss_of")),
        ),
        "sharded parameters": ("fsdp2", (SHARD_PARAMETERS,)),
    }


@pytest.mark.parametrize("name", two_devices())
def test_two_jax_devices_pass(bench: Bench, name: str) -> None:
    layout, edits = two_devices()[name]
    record = attempt(bench, written(SHARDED, *edits), "jax", layout)
    assert told(record) == ("pass", None), explain(record)
    assert record.devices.used == 2


# --- watched equals bare ---

TOLD_TORCH = """

import os

import torch._dynamo.utils

graphs = torch._dynamo.utils.counters["stats"]
if os.environ.get("RANK", "0") == "0":
    print("graphs", graphs["unique_graphs"], graphs["calls_captured"])
    print("left", torch.autograd._engine_run_backward.__module__, len(torch.nn.modules.module._global_forward_hooks))
"""
TOLD_JAX = """

import jax._src.compiler

print("left", jax._src.compiler.compile_or_get_cached.__module__)
"""
COUNT_JAX = """import jax
import jax._src.monitoring

compiled = []
jax._src.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
)
"""
IN_GRAPH = """
    |import torch._dynamo
    |
    |torch._dynamo.config.trace_autograd_ops = True
    |
    |
    |def gradients_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    |    loss = loss_of(x, y)
    |    return loss, torch.autograd.grad(loss, list(model.parameters()))
    |
    |
    |if args.compile:
    |    gradients_of = torch.compile(gradients_of)
    |
    |# --- training ---
    |"""
SAME: dict[str, tuple[str, Path, Edits, bool]] = {
    "eager": ("torch", TORCH, (), False),
    "compiled": ("torch-compile", TORCH, (), False),
    "the whole step compiled": ("torch-compile", TORCH, COMPILES["the whole step"], False),
    "gradients inside the compiled graph": (
        "torch-compile",
        TORCH,
        (
            (
                "    loss = loss_of(x, y)\n    loss.backward()\n",
                """
                |    loss, gradients = gradients_of(x, y)
                |    for parameter, gradient in zip(model.parameters(), gradients):
                |        parameter.grad = gradient.detach()
                |""",
            ),
            (TORCH_COMPILE, ""),
            ("# --- training ---\n", IN_GRAPH),
        ),
        False,
    ),
    "two ranks": ("torch", DDP, (), True),
    "jax": ("jax", JAX, (("import jax\n", COUNT_JAX),), False),
    "two jax devices": ("jax", SHARDED, (("import jax\n", COUNT_JAX),), False),
}


def by_hand(folder: Path, script: Path, arguments: list[str], framework: str, ranked: bool, watched: bool) -> str:
    """What a script prints, run by the worker or by the interpreter alone."""
    variables = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    if framework == "jax":
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [str(script), *arguments]
    if watched:
        settings: dict[str, Any] = {
            "script": str(script),
            "arguments": arguments,
            "folder": str(folder),
            "observer": str(INSIDE / f"observe_{framework}.py"),
            "progress": None,
            "ranked": ranked,
            "faults": False,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [str(WORKER), str(folder / "settings.json")]
    if ranked:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SAME)
def test_a_watched_script_prints_and_compiles_what_it_does_by_hand(tmp_path: Path, name: str) -> None:
    backend, script, edits, ranked = SAME[name]
    framework = "jax" if backend == "jax" else "torch"
    (tmp_path / "data").symlink_to(DIGITS / "data")
    copy = tmp_path / framework / "train.py"
    copy.parent.mkdir()
    end = TOLD_JAX + 'print("compilations", len(compiled))\n' if framework == "jax" else TOLD_TORCH
    copy.write_text(written(script, *edits) + end)
    arguments = ["--steps", "6", "--log-every", "1", *(["--compile"] if backend == "torch-compile" else [])]
    bare = by_hand(tmp_path, copy, arguments, framework, ranked, watched=False)
    watched = by_hand(tmp_path, copy, arguments, framework, ranked, watched=True)
    assert sorted(watched.splitlines()) == sorted(bare.splitlines())  # equal losses bit for bit, equal counts
    assert bare.count("loss=") == 6
    assert "left jax._src.compiler" in bare or "left torch.autograd.graph 0" in bare
    reports = [json.loads(line) for line in (tmp_path / "rank-0.events").read_text().splitlines()]
    assert [report.get("trouble") for report in reports if report["event"] == "seen"] == [None]
    # The bare run has filled Inductor's cache; JAX has none unless it is asked to keep one.
    assert reports[-1]["warm"] is {"torch": None, "torch-compile": True, "jax": False}[backend]


def test_an_observer_leaves_nothing_behind_when_the_script_ends_early(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('step=1 loss=1.0')\n")
    by_hand(tmp_path, script, [], "torch", ranked=False, watched=True)
    reports = [json.loads(line) for line in (tmp_path / "rank-0.events").read_text().splitlines()]
    assert [report["event"] for report in reports] == ["start", "progress", "seen", "end"]
