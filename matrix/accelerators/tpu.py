"""Google's TPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix.accelerators import Accelerator

PCI = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
GOOGLE = "0x1ae0"  # PCI vendor


def count() -> int | None:
    """TPU chips: `/dev/accel*` (v2 to v4), or Google's PCI devices bound to `/dev/vfio` (v5 and later)."""
    nodes = len(list(DEV.glob("accel[0-9]*")))
    if nodes:
        return nodes
    if not (DEV / "vfio").exists():
        return 0
    vendors = []
    for path in PCI.glob("*/vendor"):
        try:
            vendors.append(path.read_text().strip())
        except OSError:  # a device that went away, or a sandbox that hides it
            continue
    return vendors.count(GOOGLE)


def absent() -> str | None:
    return "no TPU: no device node /dev/accel0 (nor a Google device under /dev/vfio)" if count() == 0 else None


def environment(driver: str, devices: int) -> dict[str, str]:
    """A TPU host's chips come whole: a process sees all of them, so nothing is hidden."""
    chosen = {"jax": {"JAX_PLATFORMS": "tpu,cpu"}, "xla": {"PJRT_DEVICE": "TPU"}}
    return chosen.get(driver, {})


def owns(device: Mapping[str, Any]) -> bool:
    return device.get("platform") == "tpu"


ACCELERATOR = Accelerator(
    name="tpu", about="Google's TPUs", absent=absent, count=count, environment=environment, owns=owns
)
