"""Scripts that end cleanly, print plausible losses and are untrue: each is red with its own cause, in every backend."""

from __future__ import annotations

import pytest

from matrix.accelerators import Accelerator
from tests.matrix.harness import Bench
from tests.matrix.variants import (
    DDP,
    JAX,
    JAX_CALL,
    JAX_PLACED,
    JAX_STATE,
    JAX_STEP,
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

TORCHES = ("torch", "torch-compile")
BACKENDS = (*TORCHES, "jax")
SINGLE = {"torch": TORCH, "torch-compile": TORCH, "jax": JAX}

TOY = Accelerator(
    name="toy",
    about="a chip that no framework here can drive",
    absent=lambda: None,
    count=lambda: 2,
    environment=lambda framework, devices: {},
    owns=lambda device: device.get("platform") == "toy",
)


# --- devices ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_that_ignores_the_device_it_was_given_is_on_the_wrong_device(bench: Bench, backend: str) -> None:
    record = attempt(bench, written(SINGLE[backend]), backend, accelerator=TOY)
    assert told(record) == ("fail", "wrong-device"), explain(record)
    assert record.failure
    assert record.failure.message == "the cell's device is toy, but the parameters were held on " + (
        "cpu:0 100%" if backend == "jax" else "cpu 100%"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_for_one_device_leaves_the_second_idle(bench: Bench, backend: str) -> None:
    record = attempt(bench, written(SINGLE[backend]), backend, "dp2")
    assert told(record) == ("fail", "idle-devices"), explain(record)
    assert record.failure
    assert record.failure.message == "the cell gave 2 devices, 1 did work"


# --- data-parallel ---

WHOLE = ("[rank::world_size]", "")
DROPOUT = (
    ("    return self.layers[-1](x)\n", "    return self.layers[-1](x)\n"),
    ("            x = F.silu(layer(x))\n", "            x = F.dropout(F.silu(layer(x)), 0.1)\n"),
    ("rng = np.random.default_rng(args.seed)\n", "rng = np.random.default_rng(args.seed)\ntorch.manual_seed(rank)\n"),
)
TWICE = ("examples={(step - logged) * BATCH}", "examples={(step - logged) * BATCH * 2}")
UNCOUNTED = (" examples={(step - logged) * BATCH}", "")
NOT_SPLIT: dict[str, Edits] = {
    "the whole batch": (WHOLE,),
    "the same half": (("[rank::world_size]", "[0::world_size]"),),
    "the whole batch, with a dropout that differs": (WHOLE, *DROPOUT),
    "the whole batch, counted twice": (WHOLE, TWICE),
    "the whole batch, counted twice, with a dropout that differs": (WHOLE, TWICE, *DROPOUT),
    "the whole batch, not counted": (WHOLE, UNCOUNTED),
    "the whole batch, not counted, with a dropout that differs": (WHOLE, UNCOUNTED, *DROPOUT),
}


@pytest.mark.parametrize("edits", NOT_SPLIT.values(), ids=NOT_SPLIT)
def test_ranks_that_are_fed_the_same_data_replicate_the_work(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(DDP, *edits), "torch", "dp2", "torchrun", reference=False)
    assert told(record) == ("fail", "replicated-work"), explain(record)


@pytest.mark.parametrize("edits", list(NOT_SPLIT.values())[0:3:2], ids=list(NOT_SPLIT)[0:3:2])
def test_compiled_ranks_that_are_fed_the_same_data_replicate_the_work(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(DDP, *edits), "torch-compile", "dp2", "torchrun", reference=False)
    assert told(record) == ("fail", "replicated-work"), explain(record)


def test_what_dropout_hides_in_a_compiled_graph_is_no_proof(bench: Bench) -> None:
    text = written(DDP, WHOLE, UNCOUNTED, *DROPOUT)
    record = attempt(bench, text, "torch-compile", "dp2", "torchrun", reference=False)
    assert (record.outcome, record.reason) == (
        "error",
        "whether the batch was split over the 2 devices could not be seen: no tokens= or examples= was printed",
    ), explain(record)


def test_ranks_that_never_exchange_gradients_do_not_compute_the_reference(bench: Bench) -> None:
    alone = ("model = nn.parallel.DistributedDataParallel(model)\n", "")
    record = attempt(bench, written(DDP, alone), "torch", "dp2", "torchrun")
    assert told(record) == ("fail", "wrong-result"), explain(record)


SHARD_MAP = """
    |def per_device(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array):
    |    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
    |    loss, gradients = jax.lax.pmean((loss, gradients), "data")
    |    updates, state = optimizer.update(gradients, state, model)
    |    return eqx.apply_updates(model, updates), state, loss
    |
    |
    |train_step = jax.jit(
    |    jax.shard_map(
    |        per_device,
    |        mesh=mesh,
    |        in_specs=(PartitionSpec(), PartitionSpec(), BATCH_SPEC, BATCH_SPEC),
    |        out_specs=PartitionSpec(),
    |        check_vma=False,
    |    )
    |)
    |
    |
    |"""
PMAP = """
    |def per_device(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array):
    |    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
    |    loss, gradients = jax.lax.pmean((loss, gradients), "data")
    |    updates, state = optimizer.update(gradients, state, model)
    |    return eqx.apply_updates(model, updates), state, loss
    |
    |
    |stack = lambda tree: jax.tree.map(lambda leaf: np.stack([leaf, leaf]), tree)
    |model, state = stack(model), stack(state)
    |mapped = jax.pmap(per_device, axis_name="data")
    |
    |
    |def train_step(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array):
    |    model, state, loss = mapped(model, state, x, y)
    |    return model, state, loss[0]
    |
    |
    |"""
PMAP_SPLIT = "x, y = images[batch].reshape(2, BATCH // 2, 64), labels[batch].reshape(2, BATCH // 2)"
PMAP_WHOLE = "x, y = np.stack([images[batch]] * 2), np.stack([labels[batch]] * 2)"
PMAP_EVAL = ("held_out = loss_of(model,", "held_out = loss_of(jax.tree.map(lambda leaf: leaf[0], model),")
NOT_SPLIT_JAX: dict[str, Edits] = {
    "jit of a replicated batch": ((JAX_PLACED, JAX_PLACED.replace("sharded", "NamedSharding(mesh, PartitionSpec())")),),
    "jit of the batch twice over": (
        (
            JAX_PLACED,
            "x, y = jax.device_put((np.tile(images[batch], (2, 1)), np.tile(labels[batch], 2)), sharded)",
        ),
    ),
    "jit of the batch twice over, counted twice": (
        (
            JAX_PLACED,
            "x, y = jax.device_put((np.tile(images[batch], (2, 1)), np.tile(labels[batch], 2)), sharded)",
        ),
        TWICE,
    ),
    "shard_map of a replicated batch": (
        (JAX_STEP, SHARD_MAP.replace("BATCH_SPEC", "PartitionSpec()")),
        (JAX_PLACED, JAX_PLACED.replace("sharded", "NamedSharding(mesh, PartitionSpec())")),
    ),
    "pmap of a replicated batch": ((JAX_STEP, PMAP), (JAX_PLACED, PMAP_WHOLE), PMAP_EVAL),
}


@pytest.mark.parametrize("edits", NOT_SPLIT_JAX.values(), ids=NOT_SPLIT_JAX)
def test_jax_devices_that_are_fed_the_same_data_replicate_the_work(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(SHARDED, *edits), "jax", "dp2")
    assert told(record) == ("fail", "replicated-work"), explain(record)


# --- fully-sharded and tensor ---


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_plain_data_parallelism_shards_no_parameter(bench: Bench, layout: str) -> None:
    text = written(DDP) if layout == "fsdp2" else written(DDP, WHOLE)
    record = attempt(bench, text, "torch", layout, "torchrun")
    assert told(record) == ("fail", "not-sharded"), explain(record)


def test_replicated_jax_parameters_are_not_sharded(bench: Bench) -> None:
    record = attempt(bench, written(SHARDED), "jax", "fsdp2")
    assert told(record) == ("fail", "not-sharded"), explain(record)


PARTLY: Edits = (
    (
        JAX_STATE,
        """
        |replicated = NamedSharding(mesh, PartitionSpec())
        |state = optimizer.init(model)
        |model = jax.device_put(model, replicated)
        |state = jax.tree.map(lambda leaf: jax.device_put(leaf, sharded), state)
        |""",
    ),
    (
        "    return eqx.apply_updates(model, updates), state, loss\n",
        """
        |    model = jax.lax.with_sharding_constraint(eqx.apply_updates(model, updates), replicated)
        |    return model, jax.lax.with_sharding_constraint(state, sharded), loss
        |""",
    ),
)


def test_a_sharded_optimizer_does_not_make_sharded_parameters(bench: Bench) -> None:
    text = written(SHARDED, *PARTLY)
    record = attempt(bench, text, "jax", "fsdp2")
    assert told(record) == ("fail", "not-sharded"), explain(record)


# --- compilation ---

UNCOMPILED: dict[str, Edits] = {
    "the flag is ignored": ((TORCH_COMPILE, ""),),
    "the result is thrown away": ((TORCH_COMPILE, "if args.compile:\n    torch.compile(model)\n"),),
    "a container is compiled whose own call is never made": (
        (TORCH_COMPILE, "if args.compile:\n    model.layers.compile()\n"),
    ),
    "the backend is eager": ((TORCH_COMPILE, 'if args.compile:\n    model = torch.compile(model, backend="eager")\n'),),
    "the backend stops before code generation": (
        (TORCH_COMPILE, 'if args.compile:\n    model = torch.compile(model, backend="aot_eager")\n'),
    ),
    "errors are suppressed": (
        (
            TORCH_COMPILE,
            """
            |import torch._dynamo
            |
            |torch._dynamo.config.suppress_errors = True
            |
            |
            |def broken(graph, inputs):
            |    raise RuntimeError("no code for this chip")
            |
            |
            |if args.compile:
            |    model = torch.compile(model, backend=broken)
            |""",
        ),
    ),
    "only the loss is compiled": (
        (TORCH_COMPILE, "cross_entropy = torch.compile(F.cross_entropy)\n"),
        ("    return F.cross_entropy(", "    return cross_entropy("),
    ),
    "only the pixels are compiled": (
        (TORCH_COMPILE, "scaled = torch.compile(lambda x: x * 1.0)\n"),
        ("    loss = loss_of(x, y)\n", "    loss = loss_of(scaled(x), y)\n"),
    ),
    "compile() of torch's own modules, whose code Dynamo passes by": (
        (TORCH_COMPILE, "if args.compile:\n    for layer in model.layers:\n        layer.compile()\n"),
    ),
    "it is compiled too often, and given up": (
        (
            TORCH_COMPILE,
            """
            |torch._dynamo.config.recompile_limit = 2
            |if args.compile:
            |    model = torch.compile(model, dynamic=False)
            |""",
        ),
        (
            "    loss = loss_of(x, y)\n",
            "    loss = (step * loss_of(x[:step], y[:step]) + (BATCH - step) * loss_of(x[step:], y[step:])) / BATCH\n",
        ),
    ),
    "the stance is eager": ((TORCH_COMPILE, TORCH_COMPILE + 'torch.compiler.set_stance("force_eager")\n'),),
}  # fmt: skip


@pytest.mark.parametrize("edits", UNCOMPILED.values(), ids=UNCOMPILED)
def test_a_script_that_compiles_nothing_that_matters_is_not_compiled(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(TORCH, *edits), "torch-compile")
    assert told(record) == ("fail", "not-compiled"), explain(record)


# --- numbers ---

RATE = ("\nLEARNING_RATE = ", "\nLEARNING_RATE = 1.01 * ")

ADDING = """
    |@eqx.filter_jit
    |def train_step(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array, past: MLP):
    |    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
    |    gradients = jax.tree.map(jnp.add, gradients, past)
    |    updates, state = optimizer.update(gradients, state, model)
    |    return eqx.apply_updates(model, updates), state, loss, gradients
    |
    |
    |"""


def unfinite(step: int) -> dict[str, Edits]:
    poisoned = f"    if step == {step}:\n        x = x * float('nan')\n"
    return {"torch": ((TORCH_STEP, poisoned + TORCH_STEP),), "jax": ((JAX_CALL, poisoned + JAX_CALL),)}


WRONG: dict[str, tuple[str, dict[str, Edits]]] = {
    "a rate that is 1 % off": ("wrong-result", {"torch": (RATE,), "jax": (RATE,)}),
    "gradients that add up": (
        "wrong-result",
        {
            "torch": (("    optimizer.zero_grad()\n", ""),),
            "jax": (
                (JAX_STEP, ADDING),
                ("logged = 0\n", "logged = 0\npast = jax.tree.map(jnp.zeros_like, model)\n"),
                (JAX_CALL, "    model, state, loss, past = train_step(model, state, x, y, past)\n"),
            ),
        },
    ),
    "NaN at step 1": ("not-finite", unfinite(1)),
    "NaN at step 2": ("not-finite", unfinite(2)),
    "NaN late": ("not-finite", unfinite(5)),
    "no output": ("no-progress", {"torch": ((TORCH_PRINT, "pass"),), "jax": ((TORCH_PRINT, "pass"),)}),
    "an early end": (
        "incomplete",
        {
            "torch": ((TORCH_STEP, "    if step == 5:\n        break\n" + TORCH_STEP),),
            "jax": ((JAX_CALL, "    if step == 5:\n        raise SystemExit\n" + JAX_CALL),),
        },
    ),
    "every second step only": (
        "incomplete",
        {key: ((TORCH_PRINT, f"if step % 2 == 0:\n            {TORCH_PRINT}"),) for key in ("torch", "jax")},
    ),
    "no evaluation": (
        "incomplete",
        {key: (('print(f"eval={held_out.item():.12g}", flush=True)', "pass"),) for key in ("torch", "jax")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_is_told_from_a_missing_one(bench: Bench, backend: str, what: str) -> None:
    if backend == "torch-compile" and what not in ("a rate that is 1 % off", "NaN at step 2", "gradients that add up"):
        pytest.skip("nothing about it depends on compilation")
    cause, edits = WRONG[what]
    text = written(SINGLE[backend], *edits[backend.partition("-")[0]])
    record = attempt(bench, text, backend)
    assert told(record) == ("fail", cause), explain(record)


@pytest.mark.parametrize("reference", [True, False], ids=["with a reference", "without one"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_unseeded_random_numbers_show_in_a_second_run(bench: Bench, backend: str, reference: bool) -> None:
    unseeded = ("rng = np.random.default_rng(args.seed)\n", "rng = np.random.default_rng()\n")
    record = attempt(bench, written(SINGLE[backend], unseeded), backend, reference=reference, repeats=2)
    assert told(record) == ("fail", "nondeterministic"), explain(record)
