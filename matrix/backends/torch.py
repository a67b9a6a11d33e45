"""PyTorch as written: eager execution."""

from matrix.backends import INSIDE, Backend

BACKEND = Backend(
    name="torch",
    framework="torch",
    distribution="torch",
    observer=INSIDE / "observe_torch.py",
    probe=INSIDE / "probe_torch.py",
)
