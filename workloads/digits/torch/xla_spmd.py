"""Train a multilayer perceptron on handwritten digits."""

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
parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
args = parser.parse_args()

# bfloat16 is mixed precision: parameters, optimiser and loss stay in float32.
dtype = torch.float64 if args.dtype == "float64" else torch.float32
xr.use_spmd()  # one process, one tensor for all devices
device, devices = torch_xla.device(), xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
rng = np.random.default_rng(args.seed)


# --- data ---

table = np.loadtxt(Path(__file__).parents[1] / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
images = torch.from_numpy(table[:, :64]).to(dtype) / 16
labels = torch.from_numpy(table[:, 64]).long()


# --- model ---


class MLP(nn.Module):
    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        return self.layers[-1](x)


def initial(shape: tuple[int, ...]) -> np.ndarray:
    """Weights are uniform and scaled by the root of their fan-in; biases are zero."""
    bound = (3 / shape[1]) ** 0.5 if len(shape) == 2 else 0.0
    return rng.uniform(-bound, bound, shape)


model = MLP((64, *HIDDEN[args.size], 10))
for parameter in model.parameters():
    parameter.data = torch.from_numpy(initial(parameter.shape)).to(dtype)
model.to(device)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


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
    xs.mark_sharding(x, mesh, ("data", None))

    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()

    if step % args.log_every == 0 or step in (1, args.steps):
        print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)
        logged = step

with torch.no_grad():
    held_out = loss_of(images[TRAIN:].to(device), labels[TRAIN:].to(device))
print(f"eval={held_out.item():.12g}", flush=True)
