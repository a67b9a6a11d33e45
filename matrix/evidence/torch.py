"""PyTorch: a script's first steps on a CUDA device that is not there, traced for shapes and devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matrix.backends import INSIDE
from matrix.evidence import Producer, Shown, Work
from matrix.failures.death import death, simple
from matrix.journal import Compiled, Failure
from matrix.launch.process import Observation
from matrix.truth import MAJORITY

BACKENDS = ("torch", "torch-compile")
WORDS = {
    "syncs": "waits for the device",
    "branches": "goes one way or the other by a value of the device, taken as false",
    "sizes": "has a shape that depends on values, taken as large as it can be",
}
MAX_NOTES = 40


def conclude(work: Work, seen: Observation) -> Shown:
    """From the run of a script on the fake device to what it shows.

    Only tensors on different devices are a failure here: another exception may come of a value that was not there.
    """
    traced = {rank: event for rank in sorted(seen.events) if (event := seen.last("traced", rank))}
    compiled = Compiled(notes=list(_notes(work, traced)))
    died = death(seen, str(work.cell.workload.folder))
    if died is not None and died.cause == "device-mismatch" and "FakeTensor" not in died.message:
        return Shown("fail", "traced", died, compiled=compiled)
    blind = next((event["reason"] for rank in seen.events for event in seen.of("blind", rank)), None)
    reason = blind or _untraced(traced, died)
    if reason is not None:
        return Shown("unavailable", reason=f"could not be traced: {reason}", compiled=compiled)
    wrong = _left_on_cpu(traced) or _idle(work, traced)
    if wrong is not None:
        return Shown("fail", "traced", wrong, compiled=compiled)
    return Shown("pass", "traced", compiled=compiled)


def _untraced(traced: Mapping[int, Mapping[str, Any]], died: Failure | None) -> str | None:
    """Why a trace says nothing of the device; None if it does."""
    unable = next((event["unable"] for event in traced.values() if event["unable"]), None)
    if unable is not None:
        return str(unable)
    if died is not None:
        return f"{died.frame}: {died.message}" if died.frame else died.message
    if not traced:
        return "the script does not import torch"
    if not any(event["steps"] or event["devices"] or event["forward"] for event in traced.values()):
        return "it ended before an optimizer took a step, and no backward pass was done on the device"
    if any(event["steps"] and not event["gradients"] for event in traced.values()):
        return "its optimizer's parameters had no gradients"
    return None


def _left_on_cpu(traced: Mapping[int, Mapping[str, Any]]) -> Failure | None:
    for rank, event in traced.items():
        held = event["parameters"]
        if event["steps"] and held.get("cuda", 0) <= MAJORITY * sum(held.values()):
            done = f"{event['operations']} operations" if event["operations"] else "nothing"
            return simple(
                "wrong-device", f"the optimizer's parameters are on the CPU; on the device was done {done}", rank
            )
    return None


def _idle(work: Work, traced: Mapping[int, Mapping[str, Any]]) -> Failure | None:
    asked = work.cell.layout.nodes * work.cell.layout.devices
    kind = "devices" if any(event["devices"] for event in traced.values()) else "forward"
    used = {index for event in traced.values() for index in event[kind]}
    if len(used) >= asked:
        return None
    return simple("idle-devices", f"{len(used)} of {asked} devices did any work")


def _notes(work: Work, traced: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """What a reader should know, of the first rank that was traced."""
    event = next(iter(traced.values()), None)
    if event is None:
        return
    steps = event["steps"]
    yield f"{steps} optimizer steps, {event['operations']} operations on the device, shapes and devices only"
    if not event["devices"]:
        yield "no gradient was asked for: only forward passes were traced"
    if work.cell.layout.strategy != "single":
        yield "whether each device does its share, and collectives agree, is not seen by tracing"
    if work.cell.backend.name == "torch-compile":
        yield "traced as it is written: torch.compile did not compile"
    if event["reached"] == "steps":
        yield f"ended after {steps} steps: what comes later was not traced"
    places = [(words, each) for kind, words in WORDS.items() for each in event[kind]]
    for words, each in places[:MAX_NOTES]:
        yield f"{each['file']}:{each['line']} {words} ({each['how']}, {each['calls']} times)"
    if len(places) > MAX_NOTES:
        yield f"and {len(places) - MAX_NOTES} more such places"


PRODUCERS = (
    Producer(
        name="torch-trace",
        evidence="traced",
        backends=BACKENDS,
        accelerators=("cuda", "rocm"),
        observer=INSIDE / "trace_torch.py",
        conclude=conclude,
        particular=False,
        steps=2,
    ),
)
