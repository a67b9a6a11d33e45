"""How a script is executed: a small module for each backend, open to others by entry point `portmatrix.backends`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSIDE = Path(__file__).parent.parent / "inside"


@dataclass(frozen=True)
class Backend:
    """How a script is executed.

    Attributes:
        name: the word on the matrix' `backend` axis.
        framework: the key under `implementations:` of a workload whose scripts it runs.
        distribution: the installed distribution that an interpreter must have (`torch`, `jax`).
        flags: names from a workload's `arguments:` that its cells switch on (`compile` for torch-compile).
        through: what drives the device for the framework, where that is not the framework itself (`xla`).
        drives: the accelerators that it can drive at all; empty where that is the framework's to say.
        environment: variables that every cell of it gets.
        observer: the file with `observe(after_import)`, run inside the cell; it says what was seen of the truth.
        probe: the script that is run in its interpreter to ask which devices the framework sees.
        compiles: whether a cell is untrue when nothing was compiled.
    """

    name: str
    framework: str
    distribution: str
    observer: Path
    probe: Path
    flags: tuple[str, ...] = ()
    through: str | None = None
    drives: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False


def available() -> dict[str, Backend]:
    """Every known backend by name, the shipped ones and those that installed packages bring.

    Raises:
        matrix.errors.UsageError: an entry point does not load or is no `Backend`.
    """
    from matrix.backends import jax, torch, torch_compile, torch_tpu, torch_xla, torch_xla_compile
    from matrix.extensions import load

    shipped = [module.BACKEND for module in (jax, torch, torch_compile, torch_xla, torch_xla_compile, torch_tpu)]
    return load("portmatrix.backends", Backend, shipped)
