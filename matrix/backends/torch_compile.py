"""PyTorch through torch.compile with Inductor: the script's own compile flag is switched on."""

from dataclasses import replace

from matrix.backends.torch import BACKEND as TORCH

BACKEND = replace(TORCH, name="torch-compile", flags=("compile",), compiles=True)
