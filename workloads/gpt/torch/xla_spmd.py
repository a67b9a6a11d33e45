"""Train a decoder-only language model on the characters of a play."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn


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
parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
args = parser.parse_args()

size = SIZES[args.size]
xr.use_spmd()  # one process, one tensor for all devices
device, devices = torch_xla.device(), xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))
# bfloat16 is mixed precision: parameters, optimiser and loss stay in float32.
dtype = torch.float64 if args.dtype == "float64" else torch.float32
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
rng = np.random.default_rng(args.seed)


# --- data ---

text = (Path(__file__).parents[1] / "data" / "coriolanus.txt").read_text(encoding="ascii")
characters = sorted(set(text))
tokens = torch.tensor([characters.index(c) for c in text])
train = len(tokens) * 9 // 10  # tokens to train on; the rest is held out


def sequences(starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the sequences that begin at these tokens: 2 x [batch, context]."""
    both = tokens[starts[:, None] + np.arange(size.context + 1)].to(device)
    return both[:, :-1], both[:, 1:]


# --- model ---


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size, vocabulary: int):
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocabulary, size.width))
        self.position = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.token) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = GPT(size, len(characters)).to(dtype)
for parameter in model.parameters():
    if parameter.ndim > 1:  # the scales and shifts of the normalisation stay one and zero
        parameter.data = torch.from_numpy(rng.normal(0, 0.02, parameter.shape)).to(dtype)
model.to(device)
if args.compile:
    model = torch.compile(model)
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, LEARNING_RATE, BETAS, EPS)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARMUP))


def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with autocast:
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten())


# --- training ---

logged = 0
for step in range(1, args.steps + 1):
    starts = rng.integers(0, train - size.context, size.batch)
    inputs, targets = sequences(starts)
    xs.mark_sharding(inputs, mesh, ("data", None))

    optimizer.zero_grad()
    loss = loss_of(inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    schedule.step()
    torch_xla.sync()

    if step % args.log_every == 0 or step in (1, args.steps):
        seen = (step - logged) * size.batch * size.context
        print(f"step={step} loss={loss.item():.12g} tokens={seen}", flush=True)
        logged = step

with torch.no_grad():
    held_out = loss_of(*sequences(train + size.context * np.arange(48)))
print(f"eval={held_out.item():.12g}", flush=True)
