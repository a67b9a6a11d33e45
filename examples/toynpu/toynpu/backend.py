"""JAX with its compiler switched off, as a backend of its own. Loaded in the controller, so it imports no framework."""

from dataclasses import replace

from matrix.backends.jax import BACKEND as JAX

BACKEND = replace(JAX, name="jax-nojit", environment={"JAX_DISABLE_JIT": "1"})
