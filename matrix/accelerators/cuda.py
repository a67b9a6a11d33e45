"""NVIDIA GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator, first, shown

DEV = Path("/dev")


def nodes() -> int | None:
    """GPUs with a device node (`/dev/nvidia0` ...); None under WSL, where there is one node for all."""
    found = [node for node in DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    return len(found) or (None if (DEV / "dxg").exists() else 0)


def count() -> int | None:
    """GPUs that a cell can be given: those of the machine, unless CUDA_VISIBLE_DEVICES shows fewer."""
    there = nodes()
    names = shown("CUDA_VISIBLE_DEVICES", there)
    return there if names is None else len(names) if there is None else min(there, len(names))


def absent() -> str | None:
    if nodes() == 0:
        return "no NVIDIA GPU: no device node /dev/nvidia0 (nor /dev/dxg)"
    return "CUDA_VISIBLE_DEVICES hides every GPU" if count() == 0 else None


def environment(driver: str, devices: int) -> dict[str, str]:
    chosen = {"jax": {"JAX_PLATFORMS": "cuda,cpu"}, "xla": {"PJRT_DEVICE": "CUDA"}}
    return first("CUDA_VISIBLE_DEVICES", devices) | chosen.get(driver, {})


def owns(device: Mapping[str, Any]) -> bool:
    """A GPU whose runtime is not ROCm (both call themselves `cuda` in PyTorch and `gpu` in JAX)."""
    return device.get("platform") in ("cuda", "gpu") and device.get("runtime") == "cuda"


ACCELERATOR = Accelerator(
    name="cuda", about="NVIDIA GPUs", absent=absent, count=count, environment=environment, owns=owns
)
