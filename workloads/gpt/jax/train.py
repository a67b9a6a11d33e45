"""Train a decoder-only language model on the characters of a play."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    batch: int  # sequences per step, over all devices
    context: int  # tokens in a sequence


SIZES = {"tiny": Size(2, 80, 4, 24, 40), "small": Size(4, 768, 12, 16, 128), "medium": Size(12, 768, 12, 1024, 256)}
LEARNING_RATE = 1e-3
WARMUP = 60  # steps over which the learning rate grows to LEARNING_RATE
BETAS = (0.9, 0.95)  # decay of AdamW's two moments
EPS = 1e-8  # added to the root of AdamW's second moment
WEIGHT_DECAY = 0.1  # of matrices; vectors do not decay
MAX_NORM = 1.0  # the gradient is scaled down to this norm

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400, help="number of optimiser steps")
parser.add_argument("--size", choices=SIZES, default="tiny", help="how large a model")
parser.add_argument("--seed", type=int, default=0, help="seed of the initial parameters and the order of the data")
parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float32", help="of the computation")
parser.add_argument("--log-every", type=int, default=10, help="steps between two progress lines")
args = parser.parse_args()

size = SIZES[args.size]
jax.config.update("jax_enable_x64", args.dtype == "float64")
# bfloat16 is mixed precision: parameters, optimiser and loss stay in float32.
dtype = jnp.float64 if args.dtype == "float64" else jnp.float32
compute_dtype = jnp.dtype(args.dtype)
rng = np.random.default_rng(args.seed)


# --- data ---

text = (Path(__file__).parents[1] / "data" / "coriolanus.txt").read_text(encoding="ascii")
characters = sorted(set(text))
tokens = np.array([characters.index(c) for c in text], np.int32)
train = len(tokens) * 9 // 10  # tokens to train on; the rest is held out


def sequences(starts: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of the sequences that begin at these tokens: 2 x [batch, context]."""
    both = jnp.asarray(tokens[starts[:, None] + np.arange(size.context + 1)])
    return both[:, :-1], both[:, 1:]


# --- model ---


def initial(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(0, 0.02, shape), dtype)


class LayerNorm(eqx.Module):
    scale: jax.Array
    shift: jax.Array

    def __init__(self, width: int):
        self.scale, self.shift = jnp.ones(width, dtype), jnp.zeros(width, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.standardize(x.astype(dtype), epsilon=1e-5).astype(x.dtype) * self.scale + self.shift


class Block(eqx.Module):
    norm1: LayerNorm
    qkv: jax.Array
    out: jax.Array
    norm2: LayerNorm
    up: jax.Array
    down: jax.Array
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int):
        self.heads = heads
        self.norm1 = LayerNorm(width)
        self.qkv = initial((3 * width, width))
        self.out = initial((width, width))
        self.norm2 = LayerNorm(width)
        self.up = initial((4 * width, width))
        self.down = initial((width, 4 * width))

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = (self.norm1(x) @ self.qkv.T).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))
        # Not jax.nn.dot_product_attention: its softmax is in float32 even when its inputs are in float64.
        scores = (q @ k.mT / q.shape[-1] ** 0.5).astype(dtype)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        attended = jax.nn.softmax(scores).astype(x.dtype) @ v
        x = x + jnp.moveaxis(attended, 1, 2).reshape(x.shape) @ self.out.T
        return x + jax.nn.gelu(self.norm2(x) @ self.up.T, approximate=False) @ self.down.T


class GPT(eqx.Module):
    token: jax.Array
    position: jax.Array
    blocks: list[Block]
    norm: LayerNorm
    head: jax.Array

    def __init__(self, size: Size, vocabulary: int):
        self.token = initial((vocabulary, size.width))
        self.position = initial((size.context, size.width))
        self.blocks = [Block(size.width, size.heads) for _ in range(size.layers)]
        self.norm = LayerNorm(size.width)
        self.head = initial((vocabulary, size.width))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token[tokens] + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head.T


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    def update(updates, state, params=None):
        # Not optax's own: torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm before it divides.
        scale = jnp.minimum(1.0, max_norm / (optax.global_norm(updates) + 1e-6))
        return jax.tree.map(lambda u: u * scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def learning_rate(done: jax.Array) -> jax.Array:
    # The cast matters: even with 64 bits enabled JAX divides an int32 into a float32, as optax's own schedules do.
    return LEARNING_RATE * jnp.minimum(1.0, (done + 1).astype(dtype) / WARMUP)


model = GPT(size, len(characters))
decays = jax.tree.map(lambda parameter: parameter.ndim > 1, model)
adamw = optax.adamw(learning_rate, *BETAS, EPS, weight_decay=WEIGHT_DECAY, mask=decays)
optimizer = optax.chain(clip_by_global_norm(MAX_NORM), adamw)
state = optimizer.init(model)


@eqx.filter_jit
def loss_of(model: GPT, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jax.tree.map(lambda parameter: parameter.astype(compute_dtype), model)(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(dtype), targets).mean()


@eqx.filter_jit(donate="all")
def train_step(model: GPT, state: optax.OptState, inputs: jax.Array, targets: jax.Array):
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, inputs, targets)
    updates, state = optimizer.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


# --- training ---

logged = 0
for step in range(1, args.steps + 1):
    starts = rng.integers(0, train - size.context, size.batch)
    inputs, targets = sequences(starts)

    model, state, loss = train_step(model, state, inputs, targets)

    if step % args.log_every == 0 or step in (1, args.steps):
        seen = (step - logged) * size.batch * size.context
        print(f"step={step} loss={loss.item():.12g} tokens={seen}", flush=True)
        logged = step

held_out = loss_of(model, *sequences(train + size.context * np.arange(48)))
print(f"eval={held_out.item():.12g}", flush=True)
