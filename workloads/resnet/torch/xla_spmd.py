"""Train a residual network with batch normalisation on handwritten digits."""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

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
parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
args = parser.parse_args()

xr.use_spmd()  # one process, one tensor for all devices
device, devices = torch_xla.device(), xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))
# bfloat16 is mixed precision: parameters, optimiser, statistics and loss stay in float32.
dtype = torch.float64 if args.dtype == "float64" else torch.float32
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
rng = np.random.default_rng(args.seed)


# --- data ---

table = np.loadtxt(Path(__file__).parents[1] / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
images = torch.from_numpy(table[:, :64]).to(dtype).reshape(-1, 1, 8, 8) / 16
labels = torch.from_numpy(table[:, 64]).long()


# --- model ---


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)


class BatchNorm(nn.BatchNorm2d):
    """Keeps the unbiased variance, as on every other device: PyTorch/XLA takes the batch's own (2.9 does)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.running_var.clone()
        y = super().forward(x)
        if self.training:
            n = x[:, 0].numel()
            self.running_var = self.running_var + (self.running_var - (1 - self.momentum) * before) / (n - 1)
        return y


class Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = convolution(channels_in, channels_out, 3, stride)
        self.norm1 = BatchNorm(channels_out)
        self.conv2 = convolution(channels_out, channels_out, 3)
        self.norm2 = BatchNorm(channels_out)
        self.shortcut = convolution(channels_in, channels_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: tuple[int, ...], blocks: int):
        super().__init__()
        self.stem = convolution(1, channels[0], 3)
        widths = [c for c in channels for _ in range(blocks)]
        self.blocks = nn.ModuleList(Block(i, o, 1 if i == o else 2) for i, o in pairwise([channels[0], *widths]))
        self.head = nn.Linear(channels[-1], 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def initial(shape: tuple[int, ...]) -> np.ndarray:
    """Weights are uniform and scaled by the root of their fan-in (He et al. 2015)."""
    bound = (6 / np.prod(shape[1:])) ** 0.5
    return rng.uniform(-bound, bound, shape)


model = ResNet(CHANNELS[args.size], BLOCKS[args.size]).to(dtype)
for parameter in model.parameters():
    if parameter.ndim > 1:  # the scales and shifts of the normalisation stay one and zero
        parameter.data = torch.from_numpy(initial(parameter.shape)).to(dtype)
model.to(device)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with autocast:
        logits = model(x)
    return F.cross_entropy(logits.to(dtype), y, label_smoothing=LABEL_SMOOTHING)


# --- training ---

logged = 0
for step in range(1, args.steps + 1):
    turn = (step - 1) % (TRAIN // BATCH)
    if turn == 0:
        order = rng.permutation(TRAIN)
    batch = order[turn * BATCH : (turn + 1) * BATCH]
    x, y = images[batch].to(device), labels[batch].to(device)
    xs.mark_sharding(x, mesh, ("data", None, None, None))

    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()

    if step % args.log_every == 0 or step in (1, args.steps):
        print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)
        logged = step

model.eval()
with torch.no_grad():
    held_out = loss_of(images[TRAIN:].to(device), labels[TRAIN:].to(device))
print(f"eval={held_out.item():.12g}", flush=True)
