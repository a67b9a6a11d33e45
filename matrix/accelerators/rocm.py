"""AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator

KFD = Path("/dev/kfd")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def count() -> int | None:
    """GPUs in the kernel driver's topology (nodes with SIMD units); None when it cannot be read."""
    if not KFD.exists():
        return 0
    try:
        properties = [(node / "properties").read_text() for node in TOPOLOGY.iterdir()]
    except OSError:
        return None
    return sum(
        any(
            line.split()[::2] != [] and line.startswith("simd_count ") and line.split()[1] != "0"
            for line in text.splitlines()
        )
        for text in properties
    )


def absent() -> str | None:
    return "no AMD GPU: no device node /dev/kfd" if count() == 0 else None


def environment(framework: str, devices: int) -> dict[str, str]:
    visible = {"HIP_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    return visible | ({"JAX_PLATFORMS": "rocm,cpu"} if framework == "jax" else {})


def owns(device: Mapping[str, Any]) -> bool:
    """A GPU whose runtime is ROCm (both call themselves `cuda` in PyTorch and `gpu` in JAX)."""
    return device.get("platform") in ("cuda", "gpu") and device.get("runtime") == "rocm"


ACCELERATOR = Accelerator(name="rocm", about="AMD GPUs", absent=absent, count=count, environment=environment, owns=owns)
