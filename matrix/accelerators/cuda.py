"""NVIDIA GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator

DEV = Path("/dev")


def count() -> int | None:
    """GPUs with a device node (`/dev/nvidia0` ...); None under WSL, where there is one node for all."""
    nodes = [node for node in DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    return len(nodes) or (None if (DEV / "dxg").exists() else 0)


def absent() -> str | None:
    return "no NVIDIA GPU: no device node /dev/nvidia0 (nor /dev/dxg)" if count() == 0 else None


def environment(framework: str, devices: int) -> dict[str, str]:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    return visible | ({"JAX_PLATFORMS": "cuda,cpu"} if framework == "jax" else {})


def owns(device: Mapping[str, Any]) -> bool:
    """A GPU whose runtime is not ROCm (both call themselves `cuda` in PyTorch and `gpu` in JAX)."""
    return device.get("platform") in ("cuda", "gpu") and device.get("runtime") == "cuda"


ACCELERATOR = Accelerator(
    name="cuda", about="NVIDIA GPUs", absent=absent, count=count, environment=environment, owns=owns
)
