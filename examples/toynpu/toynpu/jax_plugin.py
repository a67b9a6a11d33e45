"""The chip as JAX sees it: found by JAX's own entry point, in the cell. It computes with XLA's CPU client."""

from jax._src.lib import xla_client
from jax.extend import backend


def initialize() -> None:
    """Called by JAX when it looks for plugins."""
    backend.register_backend_factory("toynpu", xla_client.make_cpu_client, priority=500)
