"""PyTorch/XLA: the graphs of a script that runs on PJRT's CPU, compiled for absent TPUs and NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from matrix import outcome
from matrix.backends import INSIDE
from matrix.evidence import MACHINE, Producer, Shown, Work, jax
from matrix.launch.process import Observation


def conclude(work: Work, seen: Observation) -> Shown:
    """From the run of a script whose graphs were captured, to what compiling them shows."""
    unable = seen.last("unable", seen.reporter)
    if unable is not None:
        return Shown("unavailable", reason=unable["reason"])
    judged = outcome.judge(work.on_host, seen, work.steps, work.log_every)
    if judged.failure is not None:
        reason = f"on the host, {judged.failure.cause}: {judged.failure.message}"
        if judged.failure.cause in MACHINE:
            return Shown("unavailable", reason=reason)
        return Shown("fail", failure=judged.failure, reason=reason)
    if judged.outcome != "pass":
        return Shown("unavailable", reason=f"on the host, {judged.reason}")
    end = seen.last("end", seen.reporter) or {}
    if not end.get("captured"):
        trouble = f" ({end['trouble']})" if end.get("trouble") else ""
        return Shown("unavailable", reason=f"no graph was captured: it never calls torch_xla.sync{trouble}")
    artifacts = [jax.Artifact(each["name"], Path(each["path"]), each["calls"]) for each in end["captured"]]
    devices = work.cell.layout.nodes * work.cell.layout.devices
    shown = jax.compile_artifacts(work, artifacts, devices, end["recompiles"])
    if shown.compiled is None or not end.get("fallbacks"):
        return shown
    fallen = ", ".join(f"{name} {count}x" for name, count in sorted(end["fallbacks"].items()))
    notes = [*shown.compiled.notes, f"left to the host's CPU: {fallen}"]
    return dataclasses.replace(shown, compiled=shown.compiled.model_copy(update={"notes": notes}))


PRODUCERS = (
    Producer(
        name="torch-xla-compile",
        evidence="compiled",
        backends=("torch-xla", "torch-xla-compile"),
        accelerators=("tpu", "cuda"),
        observer=INSIDE / "capture_xla.py",
        conclude=conclude,
        compiler="jax",
        packages=jax.PACKAGES,
    ),
)
