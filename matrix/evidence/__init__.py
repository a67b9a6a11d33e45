"""What can be shown of a cell whose accelerator is absent; each way to show something is a `Producer`.

A producer runs a source under `inside/worker.py`, on the host, with an observer of its own, and concludes from what
that reported. Where the program is compiled or traced is the observer's business; that it runs in a child process,
bounded in time and memory, and ends with all that it started, is `stage`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrix.accelerators import cpu
from matrix.journal import Compiled, Evidence, Failure, Outcome, Target

if TYPE_CHECKING:
    from matrix.attempt import Context
    from matrix.launch.process import Observation
    from matrix.plan import Cell
    from matrix.workload import Source


GIB = 1 << 30
MACHINE = ("out-of-memory-host", "rank-died")
"""Causes of a death on the host that say more of this machine than of the script: the system ended it."""


@dataclass(frozen=True)
class Work:
    """One source of one cell, to be shown for one target."""

    context: Context
    cell: Cell
    source: Source
    target: Target
    folder: Path
    """The attempt's own: logs, events, and whatever the observer leaves there."""
    timeout_s: float
    memory_bytes: int
    compiler: str = ""
    """The packages that compile for it, with versions."""
    steps: int | None = None
    """How many the script was asked for, and every how many of them it was asked for a line; None if it takes no such
    argument."""
    log_every: int | None = None

    @property
    def on_host(self) -> Cell:
        """The cell as it is run here: on the host's own processor."""
        return replace(self.cell, accelerator=cpu.ACCELERATOR)


@dataclass(frozen=True)
class Shown:
    """What a producer concludes.

    Attributes:
        outcome: `pass`; `fail`, with a failure; `unavailable`, with a reason, where nothing can be concluded here.
        evidence: how strong it is; `none` where the source failed for a reason that the target has no part in.
        target: the target with what the compiler said of it.
    """

    outcome: Outcome
    evidence: Evidence = "none"
    failure: Failure | None = None
    reason: str | None = None
    compiled: Compiled | None = None
    target: Target | None = None


def task(work: Work) -> dict[str, Any]:
    """What an observer, or a compiler that is run by itself, is told of the work; `config` is a GPU's description."""
    from matrix.evidence.targets import gpu_file

    return {
        "target": work.target.model_dump(),
        "config": str(gpu_file(work.target.name)),
        "devices": work.cell.layout.nodes * work.cell.layout.devices,
        "folder": str(work.folder),
        "compiler": work.compiler,
        "cache": str(work.context.folder.parent / ".cache" / "compiled"),
    }


def bounded(work: Work, seen: Observation) -> Shown | None:
    """What ran into the stage's own limits, or could not be watched, shows nothing of the target."""
    if seen.trouble:
        return Shown("error", reason=seen.trouble)
    if seen.ended_by == "timeout":
        return Shown("unavailable", reason=f"no result for {work.target.about} within {work.timeout_s:g} s")
    if seen.ended_by == "memory":
        gib = work.memory_bytes / GIB
        return Shown("unavailable", reason=f"no result for {work.target.about} within {gib:g} GiB of this machine")
    return None


@dataclass(frozen=True)
class Producer:
    """One way to show something of a cell without its accelerator.

    Attributes:
        name: for messages and keys; changes when the same source would be concluded upon otherwise.
        evidence: what a pass of it is: `compiled`, `traced` or `lowered`.
        backends: the backends whose cells it serves.
        accelerators: the absent accelerators that it serves.
        observer: run by the worker in the interpreter of the cell, as a backend's observer is; it also has the
            attributes `task` (`{"target": ..., "devices": ..., "folder": ...}`) and `emit(event, **fields)`, set before
            the script starts.
        conclude: from what was observed of the run to what it shows.
        particular: whether it compiles for a particular chip; if not, it is tried once for all targets of a cell.
        compiler: the backend whose interpreter has the compilers; None where it needs none.
        packages: the distributions that this interpreter must have, by accelerator.
        variables: the variables that its runs get, over those of a cell on the host's own processor.
        steps: how many a source is asked for; None for as many as the cell's run has.
    """

    name: str
    evidence: Evidence
    backends: tuple[str, ...]
    accelerators: tuple[str, ...]
    observer: Path
    conclude: Callable[[Work, Observation], Shown]
    particular: bool = True
    compiler: str | None = None
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None


def available() -> tuple[Producer, ...]:
    """Every producer, the strongest evidence first."""
    from matrix.evidence import jax, torch, torch_xla

    return (*jax.PRODUCERS, *torch_xla.PRODUCERS, *torch.PRODUCERS)


def producer_for(backend: str, accelerator: str, target: Target) -> Producer | None:
    """The strongest producer that can show something of a backend's cells for a target."""
    from matrix.evidence.targets import ANY

    for each in available():
        if backend in each.backends and accelerator in each.accelerators:
            if each.particular and target.name == ANY:
                continue
            return each
    return None
