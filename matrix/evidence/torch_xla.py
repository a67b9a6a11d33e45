"""PyTorch/XLA: the graphs of a script that runs on PJRT's CPU, compiled for absent TPUs and NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from matrix import accuracy, outcome, truth
from matrix.accelerators import cpu
from matrix.backends import INSIDE
from matrix.evidence import Producer, Shown, Work, jax
from matrix.failures.death import death, simple
from matrix.launch.process import Observation
from matrix.truth import Finding


def conclude(work: Work, seen: Observation) -> Shown:
    """From the run of a script whose graphs were captured, to what compiling them shows."""
    cell = work.cell
    unable = seen.last("unable", seen.reporter)
    if unable is not None:
        return Shown("unavailable", reason=unable["reason"])
    died = death(seen, str(cell.workload.folder))
    if died is not None:
        reason = f"on the host it fails before anything is shown: {died.cause}: {died.message}"
        return Shown("fail", failure=died, reason=reason)
    found = _truth(work, seen)
    if isinstance(found, Finding):
        reason = f"on the host, {found.cause}: {found.message}"
        return Shown("fail", failure=simple(found.cause, found.message), reason=reason)
    if found is not None:
        return Shown("unavailable", reason=f"on the host, {found.message}")
    wrong = _inaccurate(work, seen)
    if wrong is not None:
        reason = f"on the host, {wrong.cause}: {wrong.message}"
        return Shown("fail", failure=simple(wrong.cause, wrong.message), reason=reason)
    end = seen.last("end", seen.reporter) or {}
    if not end.get("captured"):
        trouble = f" ({end['trouble']})" if end.get("trouble") else ""
        return Shown("unavailable", reason=f"no graph was captured: it never calls torch_xla.sync{trouble}")
    artifacts = [jax.Artifact(each["name"], Path(each["path"]), each["calls"]) for each in end["captured"]]
    devices = cell.layout.nodes * cell.layout.devices
    shown = jax.compile_artifacts(work, artifacts, devices, end["recompiles"])
    if shown.compiled is None or not end.get("fallbacks"):
        return shown
    fallen = ", ".join(f"{name} {count}x" for name, count in sorted(end["fallbacks"].items()))
    notes = [*shown.compiled.notes, f"left to the host's CPU: {fallen}"]
    return dataclasses.replace(shown, compiled=shown.compiled.model_copy(update={"notes": notes}))


def _inaccurate(work: Work, seen: Observation) -> Finding | None:
    """The first value on the host that is off; what is wrong there is no better for being compiled elsewhere."""
    reference = work.cell.reference
    reports = [report for rank in seen.events if (report := seen.last("seen", rank))]
    precision = accuracy.precision(reports, "cpu")
    limit = accuracy.tolerance(reference, precision) if reference and precision else None
    if reference is None or limit is None:
        return None
    final = seen.last("eval", seen.reporter)
    return accuracy.compare(outcome.losses(seen), float(final["value"]) if final else None, reference, limit)[0]


def _truth(work: Work, seen: Observation) -> truth.Finding | truth.Unseen | None:
    """Whether the script lays its work on PJRT's devices as the cell's layout says."""
    cell = work.cell
    reports = {}
    for rank in seen.events:
        if (start := seen.last("start", rank)) is not None:
            reports[rank] = {**(seen.last("seen", rank) or seen.last("blind", rank) or {}), "host": start["host"]}
    return truth.check(
        reports,
        cell.layout,
        cell.backend.framework,
        "cpu through xla",
        lambda device: device.get("through") == "xla" and cpu.owns(device),
        cell.backend.compiles,
        truth.units_per_step(seen.of("progress", seen.reporter)),
        2 if cell.workload.unit == "tokens" else 1,
    ).problem


PRODUCERS = (
    Producer(
        name="torch-xla-compile-1",
        evidence="compiled",
        backends=("torch-xla", "torch-xla-compile"),
        accelerators=("tpu", "cuda"),
        observer=INSIDE / "capture_xla.py",
        conclude=conclude,
        compiler="jax",
        packages=jax.PACKAGES,
    ),
)
