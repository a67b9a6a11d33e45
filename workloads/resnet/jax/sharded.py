"""Train a residual network with batch normalisation on handwritten digits."""

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
CHANNELS = {"tiny": (14, 28), "small": (80, 160, 320)}  # of each stage; all but the first halve the image
BLOCKS = {"tiny": 1, "small": 2}  # residual blocks in a stage
LEARNING_RATE = 0.02
MOMENTUM = 0.9
LABEL_SMOOTHING = 0.1  # share of the target that is spread over all digits
WEIGHT_DECAY = 5e-4

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400, help="number of optimiser steps")
parser.add_argument("--size", choices=CHANNELS, default="tiny", help="how large a model")
parser.add_argument("--seed", type=int, default=0, help="seed of the initial parameters and the order of the data")
parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float32", help="of the computation")
parser.add_argument("--log-every", type=int, default=10, help="steps between two progress lines")
args = parser.parse_args()

jax.config.update("jax_enable_x64", args.dtype == "float64")
# bfloat16 is mixed precision: parameters, optimiser, statistics and loss stay in float32.
dtype = jnp.float64 if args.dtype == "float64" else jnp.float32
compute_dtype = jnp.dtype(args.dtype)
rng = np.random.default_rng(args.seed)
mesh = Mesh(jax.devices(), ("data",))
sharded = NamedSharding(mesh, PartitionSpec("data"))


# --- data ---

table = np.loadtxt(Path(__file__).parents[1] / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
images = table[:, :64].astype(dtype).reshape(-1, 1, 8, 8) / 16
labels = table[:, 64].astype(np.int32)


# --- model ---


def initial(shape: tuple[int, ...]) -> jax.Array:
    """Weights are uniform and scaled by the root of their fan-in (He et al. 2015)."""
    bound = (6 / np.prod(shape[1:])) ** 0.5
    return jnp.asarray(rng.uniform(-bound, bound, shape), dtype)


class Convolution(eqx.Module):
    weight: jax.Array
    stride: int = eqx.field(static=True)

    def __init__(self, channels_in: int, channels_out: int, size: int, stride: int = 1):
        self.weight = initial((channels_out, channels_in, size, size))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        pad = self.weight.shape[-1] // 2
        weight = self.weight.astype(x.dtype)
        return jax.lax.conv_general_dilated(x, weight, (self.stride, self.stride), [(pad, pad), (pad, pad)])


class Statistics(eqx.Module):
    """What batch normalisation carries from step to step, beside the parameters."""

    mean: jax.Array
    var: jax.Array


class BatchNorm(eqx.Module):
    # Not eqx.nn.BatchNorm: its running variance is the biased one, its decay the complement of torch's momentum.
    scale: jax.Array
    shift: jax.Array

    def __init__(self, channels: int):
        self.scale, self.shift = jnp.ones(channels, dtype), jnp.zeros(channels, dtype)

    def __call__(self, x: jax.Array, running: Statistics, training: bool) -> tuple[jax.Array, Statistics]:
        inputs, x = x, x.astype(dtype)
        mean, var = running.mean, running.var
        if training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
            n = x.size / x.shape[1]
            # As torch does: the batch is normalised by the biased variance, the running one is unbiased.
            running = Statistics(0.9 * running.mean + 0.1 * mean, 0.9 * running.var + 0.1 * var * n / (n - 1))
        scale = self.scale * jax.lax.rsqrt(var + 1e-5)
        x = (x - mean[:, None, None]) * scale[:, None, None] + self.shift[:, None, None]
        return x.astype(inputs.dtype), running


class Block(eqx.Module):
    conv1: Convolution
    norm1: BatchNorm
    conv2: Convolution
    norm2: BatchNorm
    shortcut: Convolution

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        self.conv1 = Convolution(channels_in, channels_out, 3, stride)
        self.norm1 = BatchNorm(channels_out)
        self.conv2 = Convolution(channels_out, channels_out, 3)
        self.norm2 = BatchNorm(channels_out)
        self.shortcut = Convolution(channels_in, channels_out, 1, stride)

    def __call__(self, x: jax.Array, running: tuple[Statistics, Statistics], training: bool):
        y, running1 = self.norm1(self.conv1(x), running[0], training)
        y, running2 = self.norm2(self.conv2(jax.nn.silu(y)), running[1], training)
        return jax.nn.silu(y + self.shortcut(x)), (running1, running2)


class ResNet(eqx.Module):
    stem: Convolution
    blocks: list[Block]
    head: jax.Array

    def __init__(self, channels: tuple[int, ...], blocks: int):
        self.stem = Convolution(1, channels[0], 3)
        widths = [c for c in channels for _ in range(blocks)]
        self.blocks = [Block(i, o, 1 if i == o else 2) for i, o in pairwise([channels[0], *widths])]
        self.head = initial((10, channels[-1]))

    def __call__(self, x: jax.Array, running: list, training: bool):
        x = self.stem(x)
        updated = []
        for block, of_block in zip(self.blocks, running, strict=True):
            x, of_block = block(x, of_block, training)
            updated.append(of_block)
        return x.mean((2, 3)) @ self.head.T.astype(x.dtype), updated


model = ResNet(CHANNELS[args.size], BLOCKS[args.size])
running = [
    tuple(Statistics(jnp.zeros_like(norm.shift), jnp.ones_like(norm.scale)) for norm in (block.norm1, block.norm2))
    for block in model.blocks
]
# optax adds the weight decay to the gradient, before the momentum, as torch does.
optimizer = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(LEARNING_RATE, momentum=MOMENTUM))
state = optimizer.init(model)


def loss_of(model: ResNet, running: list, x: jax.Array, y: jax.Array, training: bool):
    logits, running = model(x.astype(compute_dtype), running, training)
    targets = optax.smooth_labels(jax.nn.one_hot(y, 10, dtype=dtype), LABEL_SMOOTHING)
    return optax.softmax_cross_entropy(logits.astype(dtype), targets).mean(), running


@eqx.filter_jit(donate="all")
def train_step(model: ResNet, running: list, state: optax.OptState, x: jax.Array, y: jax.Array):
    (loss, running), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, running, x, y, True)
    updates, state = optimizer.update(gradients, state, model)
    return eqx.apply_updates(model, updates), running, state, loss


# --- training ---

logged = 0
for step in range(1, args.steps + 1):
    turn = (step - 1) % (TRAIN // BATCH)
    if turn == 0:
        order = rng.permutation(TRAIN)
    batch = order[turn * BATCH : (turn + 1) * BATCH]
    x, y = jax.device_put((images[batch], labels[batch]), sharded)

    model, running, state, loss = train_step(model, running, state, x, y)

    if step % args.log_every == 0 or step in (1, args.steps):
        print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)
        logged = step

held_out, _ = eqx.filter_jit(loss_of)(model, running, jnp.asarray(images[TRAIN:]), jnp.asarray(labels[TRAIN:]), False)
print(f"eval={held_out.item():.12g}", flush=True)
