"""The host's own processor; JAX and PyTorch/XLA can be told to see it as several devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from matrix.accelerators import Accelerator


def environment(driver: str, devices: int) -> dict[str, str]:
    """Hide what else the machine has; split the host into `devices` devices of JAX or PyTorch/XLA."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    if driver == "xla":
        return hidden | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    if driver == "jax":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        return hidden | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return hidden


def owns(device: Mapping[str, Any]) -> bool:
    return device.get("platform") == "cpu"


ACCELERATOR = Accelerator(
    name="cpu",
    about="the host's own processor",
    absent=lambda: None,
    count=lambda: None,
    environment=environment,
    owns=owns,
    shared=True,
)
