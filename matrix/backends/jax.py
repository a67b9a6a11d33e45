"""JAX: whatever the script jits, on the platform that the cell names."""

from matrix.backends import INSIDE, Backend

BACKEND = Backend(
    name="jax",
    framework="jax",
    distribution="jax",
    observer=INSIDE / "observe_jax.py",
    probe=INSIDE / "probe_jax.py",
)
