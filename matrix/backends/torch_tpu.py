"""TorchTPU: PyTorch's native TPU backend, the device `tpu`; `import torch` loads it where it is installed."""

from dataclasses import replace

from matrix.backends.torch import BACKEND as TORCH

BACKEND = replace(TORCH, name="torch-tpu", distribution="torch-tpu", drives=("tpu",))
