"""The kinds of device: a small module for each, open to others by entry point `portmatrix.accelerators`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accelerator:
    """A kind of device that a cell can name.

    Attributes:
        name: the word on the matrix' `accelerator` axis.
        about: what it is, for messages (`the machine has NVIDIA GPUs, but ...`).
        absent: says why this machine has no such device, or None when it has one (or may have: then the
            framework decides). It looks at device nodes and the like, never at a framework.
        count: how many such devices the machine has, or None when only the framework knows.
        environment: the variables that show a cell its first `devices` devices, by the name of what drives them: the
            framework, or what stands between it and the device (`xla`).
        owns: whether a device, as the observers' `device` describes it (`inside/observe_torch.py`), is of this kind.
        shared: whether several devices of a cell are one piece of hardware, so that their speed says nothing.
    """

    name: str
    about: str
    absent: Callable[[], str | None]
    count: Callable[[], int | None]
    environment: Callable[[str, int], Mapping[str, str]]
    owns: Callable[[Mapping[str, Any]], bool]
    shared: bool = False


def shown(variable: str, count: int | None) -> list[str] | None:
    """The devices of a machine that a variable like CUDA_VISIBLE_DEVICES already shows, by name.

    Args:
        variable: a list of names separated by commas; unset shows all, -1 ends the list.
        count: devices of the machine; None when only the framework knows.

    Returns:
        Their names; None when the variable is not set and `count` is None.
    """
    given = os.environ.get(variable)
    if given is None:
        return None if count is None else [str(index) for index in range(count)]
    names = [name.strip() for name in given.split(",")]
    hidden = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:hidden]


def first(variable: str, devices: int) -> dict[str, str]:
    """The variable, set so that it shows the first `devices` of the devices that it shows now."""
    names = shown(variable, devices) or []
    return {variable: ",".join(names[:devices])}


def available() -> dict[str, Accelerator]:
    """Every known accelerator by name, the shipped ones and those that installed packages bring.

    Raises:
        matrix.errors.UsageError: an entry point does not load or is no `Accelerator`.
    """
    from matrix.accelerators import cpu, cuda, rocm, tpu
    from matrix.extensions import load

    shipped = [module.ACCELERATOR for module in (cpu, cuda, rocm, tpu)]
    return load("portmatrix.accelerators", Accelerator, shipped)
