"""PyTorch/XLA: lazy tensors, whose graphs XLA compiles for the device that PJRT drives."""

from dataclasses import replace

from matrix.backends import INSIDE
from matrix.backends.torch import BACKEND as TORCH

BACKEND = replace(
    TORCH,
    name="torch-xla",
    distribution="torch-xla",
    observer=INSIDE / "observe_xla.py",
    probe=INSIDE / "probe_xla.py",
    through="xla",
    drives=("cpu", "cuda", "tpu"),
)
