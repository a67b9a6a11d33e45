"""The chip as portmatrix sees it. Loaded in the controller, so it imports no framework."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator


def node() -> Path:
    return Path(os.environ.get("TOYNPU_NODE", "/dev/toynpu0"))


def absent() -> str | None:
    """Positive absence: the device node that the driver would make is not there."""
    return None if node().exists() else f"no ToyNPU: no device node {node()}"


def environment(framework: str, devices: int) -> dict[str, str]:
    """Show a cell its first devices, and make the framework prefer them."""
    visible = {"TOYNPU_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    return visible | ({"JAX_PLATFORMS": "toynpu,cpu"} if framework == "jax" else {})


def owns(device: Mapping[str, Any]) -> bool:
    """A JAX device of the backend that the plugin registered."""
    return "toynpu" in device.get("names", ())


ACCELERATOR = Accelerator(
    name="toynpu",
    about="a ToyNPU",
    absent=absent,
    count=lambda: 1 if node().exists() else 0,
    environment=environment,
    owns=owns,
)
