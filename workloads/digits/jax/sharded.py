"""Train a multilayer perceptron on handwritten digits."""

import argparse
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH = 96  # examples per step, over all devices
TRAIN = 1536  # images to train on (16 batches an epoch); the rest is held out
HIDDEN = {"tiny": (144, 80), "small": (1040, 1040, 1040)}  # widths of the hidden layers
LEARNING_RATE = 0.05
MOMENTUM = 0.9
LABEL_SMOOTHING = 0.1  # share of the target that is spread over all digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400, help="number of optimiser steps")
parser.add_argument("--size", choices=HIDDEN, default="tiny", help="how large a model")
parser.add_argument("--seed", type=int, default=0, help="seed of the initial parameters and the order of the data")
parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float32", help="of the computation")
parser.add_argument("--log-every", type=int, default=10, help="steps between two progress lines")
args = parser.parse_args()

jax.config.update("jax_enable_x64", args.dtype == "float64")
# bfloat16 is mixed precision: parameters, optimiser and loss stay in float32.
dtype = jnp.float64 if args.dtype == "float64" else jnp.float32
compute_dtype = jnp.dtype(args.dtype)
rng = np.random.default_rng(args.seed)
mesh = Mesh(jax.devices(), ("data",))
sharded = NamedSharding(mesh, PartitionSpec("data"))


# --- data ---

table = np.loadtxt(Path(__file__).parents[1] / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
images = table[:, :64].astype(dtype) / 16
labels = table[:, 64].astype(np.int32)


# --- model ---


class MLP(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, widths: tuple[int, ...], key: jax.Array):
        self.layers = [eqx.nn.Linear(i, o, key=key) for i, o in pairwise(widths)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = jax.nn.silu(layer(x))
        return self.layers[-1](x)


def initial(shape: tuple[int, ...]) -> np.ndarray:
    """Weights are uniform and scaled by the root of their fan-in; biases are zero."""
    bound = (3 / shape[1]) ** 0.5 if len(shape) == 2 else 0.0
    return rng.uniform(-bound, bound, shape)


model = MLP((64, *HIDDEN[args.size], 10), jax.random.key(0))
model = jax.tree.map(lambda parameter: jnp.asarray(initial(parameter.shape), dtype), model)
optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
state = optimizer.init(model)


@eqx.filter_jit
def loss_of(model: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    model, x = jax.tree.map(lambda a: a.astype(compute_dtype), (model, x))
    logits = jax.vmap(model)(x)
    targets = optax.smooth_labels(jax.nn.one_hot(y, 10, dtype=dtype), LABEL_SMOOTHING)
    return optax.softmax_cross_entropy(logits.astype(dtype), targets).mean()


@eqx.filter_jit(donate="all")
def train_step(model: MLP, state: optax.OptState, x: jax.Array, y: jax.Array):
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
    updates, state = optimizer.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


# --- training ---

logged = 0
for step in range(1, args.steps + 1):
    turn = (step - 1) % (TRAIN // BATCH)
    if turn == 0:
        order = rng.permutation(TRAIN)
    batch = order[turn * BATCH : (turn + 1) * BATCH]
    x, y = jax.device_put((images[batch], labels[batch]), sharded)

    model, state, loss = train_step(model, state, x, y)

    if step % args.log_every == 0 or step in (1, args.steps):
        print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)
        logged = step

held_out = loss_of(model, jnp.asarray(images[TRAIN:]), jnp.asarray(labels[TRAIN:]))
print(f"eval={held_out.item():.12g}", flush=True)
