"""Whether the work was done where and how the cell says: the silent failures that a right loss does not show.

The observers inside the cell (`inside/observe_torch.py`, `inside/observe_jax.py`) report what they saw; here it is
held against the cell. Every rule is about a strategy, none about a workload:

    all             the target device held the parameters and did the work; every device given did some
    data            the ranks' inputs differ, and a device does 1/n of the batch or of the FLOPs
    fully-sharded,  a device holds about 1/n of the parameters' bytes
    tensor, hybrid
    torch-compile   graphs were captured, compiled, and gradients come out of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from matrix.journal import Layout

Seen = Mapping[str, Any]
"""The `seen` event of one rank."""

MAJORITY = 0.5  # of parameter bytes, of work, of bytes behind compiled graphs: less is not "the work"


@dataclass(frozen=True)
class Finding:
    """An untruth: its cause, and what was seen in one sentence."""

    cause: str
    message: str


@dataclass(frozen=True)
class Unseen:
    """What could not be seen, so that nothing can be claimed."""

    message: str


@dataclass(frozen=True)
class Truth:
    """What the observers' reports amount to.

    Attributes:
        problem: the first untruth, or what could not be seen, or None when all is as the cell says.
        used: devices that did work.
        kind: the device's name, as its framework calls it.
    """

    problem: Finding | Unseen | None
    used: int | None
    kind: str


def check(
    ranks: Mapping[int, Seen],
    layout: Layout,
    framework: str,
    target: str,
    owns: Callable[[Mapping[str, Any]], bool],
    must_compile: bool,
    units_per_step: float | None,
) -> Truth:
    """Hold what the ranks reported against what their cell promises.

    Args:
        ranks: the report of each rank that made one.
        layout: nodes, devices and strategy of the cell.
        framework: the framework whose cell it is (`torch`, `jax`).
        target: the accelerator's name, for messages.
        owns: whether a described device is of that accelerator.
        must_compile: whether the backend is one that compiles.
        units_per_step: examples or tokens of one step over all devices, from the progress lines.
    """
    if not ranks:
        return Truth(Unseen("no process of the cell reported what it did"), None, "")
    if all(seen.get("framework") is None for seen in ranks.values()):
        return Truth(Finding("wrong-device", f"the script never imported {framework}"), 0, "")
    devices = [device | {"rank": rank} for rank, seen in ranks.items() for device in seen.get("devices", ())]
    kind = next((str(device.get("kind", "")) for device in devices if owns(device)), "")
    used = len({(_place(d, ranks), d["id"]) for d in devices if owns(d) and _busy(d)})
    problem = (
        _device(devices, target, owns, ranks)
        or _idle(used, layout)
        or _strategy(ranks, layout, units_per_step)
        or (_compiled(ranks) if must_compile else None)
    )
    return Truth(problem, used, kind)


def _place(device: Mapping[str, Any], ranks: Mapping[int, Seen]) -> Any:
    """What tells two devices of one id apart: on a CPU the process, else the host."""
    return device["rank"] if device["platform"] == "cpu" else ranks[device["rank"]].get("host")


def _busy(device: Mapping[str, Any]) -> bool:
    return bool(device.get("work") or device.get("parameter_bytes"))


def _device(
    devices: Sequence[Mapping[str, Any]],
    target: str,
    owns: Callable[[Mapping[str, Any]], bool],
    ranks: Mapping[int, Seen],
) -> Finding | Unseen | None:
    measured = False
    for quantity, words in (("parameter_bytes", "parameters were held"), ("work", "work was done")):
        total = sum(device.get(quantity, 0) for device in devices)
        if not total:
            continue
        measured = True
        there = sum(device.get(quantity, 0) for device in devices if owns(device))
        if there < MAJORITY * total:
            where = Counter[str]()
            for device in devices:
                where[_name(device)] += device.get(quantity, 0)
            places = ", ".join(f"{name} {count / total:.0%}" for name, count in where.most_common(3))
            return Finding("wrong-device", f"the cell's device is {target}, but the {words} on {places}")
    if not measured:
        trouble = next((seen["trouble"] for seen in ranks.values() if seen.get("trouble")), None)
        return Unseen("no work was seen: no backward call, no optimizer, no compiled step" + _because(trouble))
    return None


def _name(device: Mapping[str, Any]) -> str:
    runtime = device.get("runtime")
    return f"{device['id']} ({runtime})" if runtime and runtime not in device["id"] else str(device["id"])


def _because(trouble: str | None) -> str:
    return f" ({trouble})" if trouble else ""


def _idle(used: int, layout: Layout) -> Finding | None:
    expected = layout.nodes * layout.devices
    if used < expected:
        return Finding("idle-devices", f"the cell gave {expected} devices, {used} did work")
    return None


def _strategy(ranks: Mapping[int, Seen], layout: Layout, units: float | None) -> Finding | Unseen | None:
    n = layout.nodes * layout.devices
    if n == 1:
        return None
    if layout.strategy == "data":
        return _split(ranks, n, units, required=True)
    if layout.strategy in ("fully-sharded", "tensor", "hybrid"):
        return _sharded(ranks, n) or (
            _split(ranks, n, units, required=False) if layout.strategy == "fully-sharded" else None
        )
    return None


def _split(ranks: Mapping[int, Seen], n: int, units: float | None, required: bool) -> Finding | Unseen | None:
    """The data-parallel rule: inputs differ, and each device does 1/n."""
    prints = {rank: seen["fingerprint"] for rank, seen in ranks.items() if seen.get("fingerprint")}
    for value, count in Counter(prints.values()).items():
        if count > 1:
            same = [str(rank) for rank, each in prints.items() if each == value]
            return Finding(
                "replicated-work",
                f"ranks {', '.join(same)} computed the same gradient, so they were fed the same data",
            )
    shares = [seen["work_share"] for seen in ranks.values() if seen.get("work_share") is not None]
    if shares and max(shares) > (1 + 1 / n) / 2:
        return Finding(
            "replicated-work",
            f"each device does {max(shares):.0%} of the step's FLOPs; split over {n} it would do {1 / n:.0%}",
        )
    batches = [_batch(seen, units, n) for seen in ranks.values()]
    if "whole" in batches:
        return Finding(
            "replicated-work",
            f"a device processes all {units:g} units of a step; split over {n} it would process {(units or 0) / n:g}",
        )
    if not required or shares or len(prints) == len(ranks) > 1 or all(batch == "part" for batch in batches):
        return None
    return Unseen(f"whether the batch was split over the {n} devices could not be seen")


def _batch(seen: Seen, units: float | None, n: int) -> str | None:
    """Whether the leading sizes of the values show 1/n of the batch (`part`) or all of it (`whole`)."""
    if not units or not seen.get("shapes"):
        return None
    parameters = {tuple(shape) for shape in seen.get("parameter_shapes", ())}
    parameters |= {shape[::-1] for shape in parameters}
    sizes: set[int] = set()
    for shape in seen["shapes"]:
        if tuple(shape) not in parameters:
            sizes |= set(accumulate(shape, mul))
    if units / n in sizes:
        return "part"
    return "whole" if units in sizes else None


def _sharded(ranks: Mapping[int, Seen], n: int) -> Finding | Unseen | None:
    shares = []
    for seen in ranks.values():
        held = seen.get("parameter_bytes", {})
        if held.get("global"):
            shares.append(held["local"] / held["global"])
    if not shares:
        return Unseen("how the parameters were laid on the devices could not be seen")
    if max(shares) > (1 + 1 / n) / 2:
        return Finding(
            "not-sharded",
            f"a device holds {max(shares):.0%} of the parameters' bytes; sharded over {n} it would hold {1 / n:.0%}",
        )
    return None


def _compiled(ranks: Mapping[int, Seen]) -> Finding | None:
    for rank, seen in ranks.items():
        compiled = seen.get("compiled", {})
        if not compiled.get("graphs"):
            return Finding("not-compiled", f"rank {rank}: Dynamo captured no graph, everything ran eagerly")
        if not compiled.get("inductor"):
            return Finding(
                "not-compiled", f"rank {rank}: Dynamo captured {compiled['graphs']} graphs, Inductor compiled none"
            )
        held = seen.get("parameter_bytes", {}).get("local", 0)
        through = compiled.get("parameter_bytes", 0)
        if held and seen.get("backward_calls") and through < MAJORITY * held:
            return Finding(
                "not-compiled",
                f"rank {rank}: {through / held:.0%} of the parameters' bytes get their gradient from a compiled graph",
            )
    return None


def units_per_step(progress: Iterable[Mapping[str, Any]]) -> float | None:
    """Examples or tokens of one step, from the lines of a rank (each counts since the line before it)."""
    lines = list(progress)
    for before, line in zip(lines, lines[1:], strict=False):
        steps = line["step"] - before["step"]
        if line.get("units") and steps > 0:
            return float(line["units"]) / float(steps)
    if lines and lines[0].get("units") and lines[0]["step"] in (0, 1):
        return float(lines[0]["units"])
    return None
