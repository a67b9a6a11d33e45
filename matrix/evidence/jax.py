"""JAX: what a script jits, compiled for absent TPUs and NVIDIA GPUs; elsewhere lowered, which says little."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix import accuracy, outcome
from matrix.accelerators import cpu
from matrix.attempt import own
from matrix.backends import INSIDE
from matrix.evidence import GIB, MACHINE, Producer, Shown, Work, bounded, task
from matrix.failures import recognise
from matrix.failures.death import death, simple
from matrix.journal import Compiled, Failure, Function, Target
from matrix.launch import process
from matrix.launch.process import Observation, Order
from matrix.truth import Finding

OBSERVER, COMPILER = INSIDE / "compile_jax.py", INSIDE / "chips_jax.py"
PACKAGES = {
    "tpu": ("libtpu",),
    # The plug-in, and what it calls: ptxas and nvlink, libdevice.
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink"),
}
VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask Google's metadata server which machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nobody holds a chip, so cells beside each other need not wait
}


@dataclass(frozen=True)
class Artifact:
    """A portable StableHLO program that another framework captured.

    Attributes:
        name: for messages and reports.
        path: of the serialised artifact.
        calls: how often it was run.
    """

    name: str
    path: Path
    calls: int = 1


def conclude(work: Work, seen: Observation) -> Shown:
    """From the run of a script whose jitted functions were compiled, to what that shows."""
    return concluded(work, seen) or _true(work, seen)


def concluded(work: Work, seen: Observation) -> Shown | None:
    """What the compiler's part of a run shows; None where it accepted everything, and it fits.

    Args:
        work: what was to be shown.
        seen: the run, with the events of `inside/compile_jax.py`.
    """
    target = _target(work, seen)
    against = _against(work, seen)
    if against is not None:
        return against
    died = death(seen, str(work.cell.workload.folder))
    if died is not None:
        reason = f"on the host it fails before anything is shown: {died.cause}: {died.message}"
        if died.cause in MACHINE:
            return Shown("unavailable", reason=reason, target=target)
        return Shown("fail", "none", died, reason, target=target)
    blind = seen.last("blind", 0)
    if blind is not None:
        reason = f"what it did could not be observed: {blind['reason']}"
        return Shown("unavailable", reason=reason, target=target)
    compiled = compiled_of(seen)
    if not compiled.functions:
        return Shown("unavailable", reason="nothing was compiled: it calls no jitted function", target=target)
    return _fits(work, compiled, target)


def _against(work: Work, seen: Observation) -> Shown | None:
    """What the compiler said no to, or why it could not say; None if neither."""
    target = _target(work, seen)
    said = next((event for event in seen.events.get(0, ()) if event["event"] in ("unable", "refused")), None)
    if said is not None and said["event"] == "unable":
        return Shown("unavailable", reason=said["reason"], target=target)
    if said is not None:
        return Shown("fail", _evidence(work), _refusal(work, seen, said), target=target)
    begun = seen.of("compiling", 0)
    if not seen.code or seen.code > 0 or len(begun) == len(seen.of("compiled", 0)):
        return None
    died = death(seen, str(work.cell.workload.folder)) or simple("crash", f"exit code {seen.code}")
    message = f"while {begun[-1]['name']} was compiled, {died.message}"
    if died.cause in MACHINE:
        return Shown("unavailable", reason=f"this machine did not let the compiler end: {message}", target=target)
    crashed = died.model_copy(update={"message": f"the compiler crashed: {message}"})
    return Shown("fail", _evidence(work), crashed, target=target)


def compiled_of(seen: Observation) -> Compiled:
    """What was compiled in a run that came to its end."""
    end = seen.last("end", 0) or {}
    functions = [Function(**each) for each in end.get("functions", ())]
    return Compiled(functions=functions, recompiles=end.get("recompiles", 0))


def _target(work: Work, seen: Observation) -> Target:
    said = seen.last("compiled", 0) or {}
    return work.target.model_copy(update={"kind": said.get("kind", ""), "compiler": work.compiler})


def _evidence(work: Work) -> Any:
    return "lowered" if work.target.name == "any" else "compiled"


def _refusal(work: Work, seen: Observation, refused: process.Event) -> Failure:
    """The compiler's words, at the script's line that called the function."""
    words = refused["message"]
    cause = recognise.recognise([{"type": "launcher", "message": words}], "/nowhere").cause
    cause = "compile-error" if cause == "exception" else cause
    died = death(seen, str(work.cell.workload.folder))
    told = simple(cause, f"{refused['name']}: {words}", frame=died.frame if died else None)
    place = {"excerpt": died.excerpt, "traceback": died.traceback} if died else {}
    return told.model_copy(update=place)


def compile_artifacts(work: Work, artifacts: Sequence[Artifact], devices: int, recompiles: int = 0) -> Shown:
    """Compile what another framework captured for the target of `work`, in the interpreter that has its compiler.

    Args:
        work: what it was captured for; its folder gets one of its own for this.
        artifacts: portable StableHLO.
        devices: partitions of each.
        recompiles: how many of them are programs beyond the first of a function; only recorded.
    """
    interpreter = work.context.interpreters[f"jax-{work.cell.accelerator.name}"]
    assert interpreter.path is not None
    folder = work.folder / f"compile-{work.target.name.replace(':', '-')}"
    folder.mkdir()
    settings = folder / "settings.json"
    listed = [dataclasses.asdict(each) for each in artifacts]
    more = {"devices": devices, "folder": str(folder), "artifacts": listed, "recompiles": recompiles}
    settings.write_text(json.dumps(task(work) | more, default=str))
    order = Order(
        command=[interpreter.path, str(COMPILER), str(settings)],
        environment=own(os.environ) | dict(cpu.environment("jax", devices)) | VARIABLES | dict(work.cell.environment),
        cwd=folder,
        folder=folder,
        ranks=1,
        timeout_s=work.timeout_s,
        no_progress_s=work.timeout_s,
        memory_bytes=work.memory_bytes,
    )
    seen = process.run(order, lambda _: False)
    shown = bounded(work, seen) or _against(work, seen)
    if shown is not None:
        return shown
    died, compiled, target = death(seen, str(folder)), compiled_of(seen), _target(work, seen)
    if died is not None:
        return Shown("unavailable", reason=f"the compiler could not be run: {died.cause}: {died.message}")
    return _fits(work, compiled, target) or Shown("pass", "compiled", compiled=compiled, target=target)


def _fits(work: Work, compiled: Compiled, target: Target) -> Shown | None:
    """Some compilers accept what does not fit."""
    largest = max(compiled.functions, key=lambda each: each.peak_bytes or 0)
    if not target.memory_bytes or not largest.peak_bytes or largest.peak_bytes <= target.memory_bytes:
        return None
    message = (
        f"{largest.name} needs {largest.peak_bytes / GIB:.2f} GiB of device memory, "
        f"{target.about} has {target.memory_bytes / GIB:.2f} GiB"
    )
    failure = simple("out-of-memory-device", message)
    return Shown("fail", "compiled", failure, compiled=compiled, target=target)


def _true(work: Work, seen: Observation) -> Shown:
    """Whether the compiled program lays its work on the devices as the cell's layout says."""
    target, compiled = _target(work, seen), compiled_of(seen)
    end, lines = seen.last("end", 0), outcome.losses(seen)
    if end is not None and end["eager"]:
        reason = f"most of the work is done outside of jitted functions: {', '.join(end['eager'])}"
        return Shown("unavailable", reason=reason, compiled=compiled, target=target)
    found = outcome.check_truth(work.on_host, seen).problem
    if isinstance(found, Finding):
        failure = simple(found.cause, found.message)
        reason = f"laid out for {target.about}: {found.cause}: {found.message}"
        return Shown("fail", "none", failure, reason, compiled, target)
    if not lines:  # an executed one would have failed; this one may have gone another way for a value that stood in
        found = Finding("no-progress", "it ended without one progress line")
    evaluated = seen.last("eval", 0)
    evaluation = evaluated["value"] if evaluated else None
    found = found or accuracy.missing(lines, evaluation, work.cell.reference, work.steps, work.log_every)
    if found is not None:
        reason = f"accepted for {target.about}, but {found.message}"
        return Shown("unavailable", reason=reason, compiled=compiled, target=target)
    return Shown("pass", _evidence(work), compiled=compiled, target=target)


PRODUCERS = (
    Producer(
        name="jax-compile",
        evidence="compiled",
        backends=("jax",),
        accelerators=("tpu", "cuda"),
        observer=OBSERVER,
        conclude=conclude,
        compiler="jax",
        packages=PACKAGES,
        variables=VARIABLES,
    ),
    Producer(
        name="jax-lower",
        evidence="lowered",
        backends=("jax",),
        accelerators=("tpu", "cuda", "rocm"),
        observer=OBSERVER,
        conclude=conclude,
        particular=False,
    ),
)
