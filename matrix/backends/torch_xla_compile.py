"""PyTorch/XLA through torch.compile with the backend openxla: the script's own compile flag is switched on."""

from dataclasses import replace

from matrix.backends.torch_xla import BACKEND as TORCH_XLA

BACKEND = replace(TORCH_XLA, name="torch-xla-compile", flags=("compile",), compiles=True)
