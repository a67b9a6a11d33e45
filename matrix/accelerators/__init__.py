"""The kinds of device: a small module for each, open to others by entry point `portmatrix.accelerators`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accelerator:
    """A kind of device that a cell can name.

    Attributes:
        name: the word on the matrix' `accelerator` axis.
        about: one line for a listing.
        absent: says why this machine has no such device, or None when it has one (or may have: then the
            framework decides). It looks at device nodes and the like, never at a framework.
        count: how many such devices the machine has, or None when only the framework knows.
        environment: the variables that show a cell its first `devices` devices, by framework name.
        owns: whether a device, as an observer describes it (see `matrix.inside`), is of this kind.
        shared: whether several devices of a cell are one piece of hardware, so that their speed says nothing.
    """

    name: str
    about: str
    absent: Callable[[], str | None]
    count: Callable[[], int | None]
    environment: Callable[[str, int], Mapping[str, str]]
    owns: Callable[[Mapping[str, Any]], bool]
    shared: bool = False


def available() -> dict[str, Accelerator]:
    """Every known accelerator by name, the shipped ones and those that installed packages bring.

    Raises:
        matrix.errors.UsageError: an entry point does not load or is no `Accelerator`.
    """
    from matrix.accelerators import cpu, cuda, rocm, tpu
    from matrix.extensions import load

    shipped = [module.ACCELERATOR for module in (cpu, cuda, rocm, tpu)]
    return load("portmatrix.accelerators", Accelerator, shipped)
