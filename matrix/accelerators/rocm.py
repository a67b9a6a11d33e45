"""AMD GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator, first, shown

KFD = Path("/dev/kfd")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def nodes() -> int | None:
    """GPUs in the kernel driver's topology (its nodes with SIMD units); None when it cannot be read."""
    if not KFD.exists():
        return 0
    try:
        texts = [(node / "properties").read_text() for node in TOPOLOGY.iterdir()]
    except OSError:
        return None
    return sum(re.search(r"^simd_count [1-9]", text, re.MULTILINE) is not None for text in texts)


def count() -> int | None:
    """GPUs that a cell can be given: those of the machine, unless HIP_VISIBLE_DEVICES shows fewer."""
    there = nodes()
    names = shown("HIP_VISIBLE_DEVICES", there)
    return there if names is None else len(names) if there is None else min(there, len(names))


def absent() -> str | None:
    if nodes() == 0:
        return "no AMD GPU: no device node /dev/kfd, or no GPU behind it"
    return "HIP_VISIBLE_DEVICES hides every GPU" if count() == 0 else None


def environment(driver: str, devices: int) -> dict[str, str]:
    chosen = {"jax": {"JAX_PLATFORMS": "rocm,cpu"}}
    return first("HIP_VISIBLE_DEVICES", devices) | chosen.get(driver, {})


def owns(device: Mapping[str, Any]) -> bool:
    """A GPU whose runtime is ROCm (both call themselves `cuda` in PyTorch and `gpu` in JAX)."""
    return device.get("platform") in ("cuda", "gpu") and device.get("runtime") == "rocm"


ACCELERATOR = Accelerator(name="rocm", about="AMD GPUs", absent=absent, count=count, environment=environment, owns=owns)
