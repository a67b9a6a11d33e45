"""Whether the work was done where and how the cell says: the silent failures that a right loss does not show.

The observers inside the cell (`inside/observe_torch.py`, `inside/observe_jax.py`) report what they saw; here it is
held against the cell. Every rule is about a strategy, none about a workload:

    all             the target device held the parameters and did the work; every device given did some
    data            the ranks' inputs differ, a device does 1/n of the batch or of the FLOPs, and (in PyTorch/XLA, where
                    they may not) ranks combine their gradients
    fully-sharded,  a device holds about 1/n of the parameters' bytes
    tensor, hybrid
    torch-compile   graphs were captured, compiled, and gradients come out of them

What differs between ranks is a fingerprint: of the gradient that a rank computed by itself, and of the data that its
first operations were fed with. The gradients of equal data differ too where random numbers come in (dropout).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from operator import mul
from typing import Any

from matrix.journal import Layout

Seen = Mapping[str, Any]
"""The `seen` event of one rank."""

MAJORITY = 0.5  # of parameter bytes, of work, of bytes behind compiled graphs: not more is not "the work"
BUSY = 0.1  # of an equal share of the work: a device that does less is idle
SPARE = 0.25  # of what sharding saves may be missing: biases and norms are often kept whole


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
    dimensions: int = 2,
) -> Truth:
    """Hold what the ranks reported against what their cell promises.

    Args:
        ranks: the report of each rank that made one.
        layout: nodes, devices and strategy of the cell.
        framework: the framework whose cell it is (`torch`, `jax`).
        target: the accelerator's name and what drives it, for messages.
        owns: whether a described device is of that accelerator, and driven so.
        must_compile: whether the backend is one that compiles.
        units_per_step: examples or tokens of one step over all devices, from the progress lines.
        dimensions: how many leading sizes of a value make up such a unit: 1 for examples, 2 for tokens.
    """
    if not ranks:
        return Truth(Unseen("no process of the cell reported what it did"), None, "")
    for rank, seen in ranks.items():
        if "framework" not in seen:
            reason = seen.get("reason") or "it ended without a report"
            return Truth(Unseen(f"what rank {rank} did could not be seen ({reason})"), None, "")
    if all(seen.get("framework") is None for seen in ranks.values()):
        return Truth(Finding("wrong-device", f"the script never imported {framework}"), 0, "")
    ranks = {rank: seen for rank, seen in ranks.items() if seen.get("devices")} or ranks  # not who only started others
    devices = [device | {"rank": rank} for rank, seen in ranks.items() for device in seen.get("devices", ())]
    kind = next((str(device.get("kind", "")) for device in devices if owns(device)), "")
    used = _used([device for device in devices if owns(device)], layout.nodes * layout.devices, ranks)
    problem = (
        _device(devices, target, owns, ranks)
        or _idle(used, layout)
        or _strategy(ranks, layout, units_per_step, dimensions)
        or (_compiled(ranks) if must_compile else None)
        or _broken(ranks)
    )
    return Truth(problem, used, kind)


def _broken(ranks: Mapping[int, Seen]) -> Unseen | None:
    """An observer that broke after it had reported: what it was to tell at the end is not known."""
    rank = next((rank for rank, seen in ranks.items() if seen.get("broke")), None)
    return None if rank is None else Unseen(f"not all of what rank {rank} did could be seen")


def _place(device: Mapping[str, Any], ranks: Mapping[int, Seen]) -> Any:
    """What tells two devices of one id apart: on a CPU the process, else the host."""
    return device["rank"] if device["platform"] == "cpu" else ranks[device["rank"]].get("host")


def _used(devices: Sequence[Mapping[str, Any]], n: int, ranks: Mapping[int, Seen]) -> int:
    """How many of the devices did work (where none could be measured: held parameters)."""
    quantity = "work" if any(device.get("work") for device in devices) else "parameter_bytes"
    done = Counter[Any]()
    for device in devices:
        done[_place(device, ranks), device["id"]] += device.get(quantity, 0)
    least = BUSY * done.total() / n
    return sum(1 for each in done.values() if each and each >= least)


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
        if there <= MAJORITY * total:
            where = Counter[str]()
            for device in devices:
                where[_name(device)] += device.get(quantity, 0)
            places = ", ".join(f"{name} {count / total:.0%}" for name, count in where.most_common(3))
            return Finding("wrong-device", f"the cell's device is {target}, but the {words} on {places}")
    if not measured:
        trouble = next((seen["trouble"] for seen in ranks.values() if seen.get("trouble")), None)
        return Unseen("no work was seen: no backward pass, no module, no compiled step" + _because(trouble))
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


def _strategy(
    ranks: Mapping[int, Seen], layout: Layout, units: float | None, dimensions: int
) -> Finding | Unseen | None:
    n = layout.nodes * layout.devices
    if n == 1:
        return None
    if layout.strategy == "data":
        return _split(ranks, n, units, dimensions, required=True)
    if layout.strategy in ("fully-sharded", "tensor", "hybrid"):
        return _sharded(ranks, n, layout.strategy) or (
            _split(ranks, n, units, dimensions, required=False) if layout.strategy == "fully-sharded" else None
        )
    return None


def _split(
    ranks: Mapping[int, Seen], n: int, units: float | None, dimensions: int, required: bool
) -> Finding | Unseen | None:
    """The data-parallel rule: inputs differ, and each device does 1/n."""
    gradients = {f"rank {rank}": seen["fingerprint"] for rank, seen in ranks.items() if seen.get("fingerprint")}
    fed = {f"rank {rank}": seen["inputs"] for rank, seen in ranks.items() if seen.get("inputs")}
    for seen in ranks.values():
        fed |= seen.get("fed", {})
    for prints, words in ((gradients, "computed the same gradient"), (fed, "were fed the same data")):
        for value, count in Counter(prints.values()).items():
            if count > 1:
                same = [name for name, each in prints.items() if each == value]
                return Finding("replicated-work", f"{', '.join(same)} {words}")
    shared = _same_rows(ranks)
    if shared is not None:
        return shared
    states = {rank: seen["state"] for rank, seen in ranks.items() if seen.get("state")}
    if len(set(states.values())) > 1:
        return Finding(
            "not-reduced",
            f"after a step, ranks {', '.join(map(str, states))} hold different parameters: XLA in each of them knows "
            "of no other rank, and what it does not do itself changes none of its tensors",
        )
    shares = [seen["work_share"] for seen in ranks.values() if seen.get("work_share") is not None]
    if shares and max(shares) > (1 + 1 / n) / 2:
        return Finding(
            "replicated-work",
            f"each device does {max(shares):.0%} of the step's FLOPs; split over {n} it would do {1 / n:.0%}",
        )
    batches = [_batch(seen, units, n, dimensions) for seen in ranks.values()]
    if "whole" in batches:
        return Finding(
            "replicated-work",
            f"a device processes all {units:g} units of a step; split over {n} it would process {(units or 0) / n:g}",
        )
    if not required or shares or len(fed) >= n or all(batch == "part" for batch in batches):
        return None
    if len(gradients) == len(ranks) > 1 and not any(seen.get("random") for seen in ranks.values()):
        return None  # nothing but the data can have made them differ
    return Unseen(
        f"whether the batch was split over the {n} devices could not be seen: "
        + ("its sizes do not show the count of the progress lines" if units else "no tokens= or examples= was printed")
    )


def _same_rows(ranks: Mapping[int, Seen]) -> Finding | None:
    """Two devices whose batches hold mostly the same rows, in whatever order, in every tensor that they were fed.

    One tensor alone may well be the same everywhere: a mask, a frozen weight.
    """
    fed = {name or f"rank {rank}": rows for rank, seen in ranks.items() for name, rows in seen.get("rows", {}).items()}
    for (one, left), (other, right) in combinations(fed.items(), 2):
        if not left or len(left) != len(right):
            continue
        common = [
            len(set(a) & set(b)) / min(len(set(a)), len(set(b))) if a and b else 0.0
            for a, b in zip(left, right, strict=True)
        ]
        if min(common) > MAJORITY:
            return Finding("replicated-work", f"{one} and {other} were fed the same rows: {min(common):.0%} of a batch")
    return None


def _batch(seen: Seen, units: float | None, n: int, dimensions: int) -> str | None:
    """Whether the leading sizes of most values show 1/n of the batch (`part`) or all of it (`whole`)."""
    if not units or not seen.get("shapes"):
        return None
    parameters = {tuple(shape) for shape in seen.get("parameter_shapes", ())}
    parameters |= {shape[::-1] for shape in parameters}
    there = units * seen.get("shapes_over", 1)  # shapes of all devices together show n times what one processes
    part = whole = 0
    for shape in seen["shapes"]:
        if tuple(shape) not in parameters:
            sizes = set(accumulate(shape[:dimensions], mul))  # (batch, time, ...): batch * time are the tokens
            part += there / n in sizes
            whole += there in sizes and there / n not in sizes
    if part == whole:
        return None
    return "part" if part > whole else "whole"


def _sharded(ranks: Mapping[int, Seen], n: int, strategy: str) -> Finding | Unseen | None:
    shares = []
    for seen in ranks.values():
        held = seen.get("parameter_bytes", {})
        if held.get("global"):
            shares.append(held["local"] / held["global"])
    if not shares:
        return Unseen("how the parameters were laid on the devices could not be seen")
    prints = {seen.get("fingerprint") for seen in ranks.values()}
    plain = all(seen.get("plain_parameters") for seen in ranks.values())
    if strategy != "fully-sharded" and plain and None not in prints and len(prints) == len(ranks) == n:
        return Unseen(
            "each rank holds plain tensors with gradients of their own: slices cut by hand cannot be told from copies"
        )
    if max(shares) > 1 / n + SPARE * (1 - 1 / n):
        return Finding(
            "not-sharded",
            f"a device holds {max(shares):.0%} of the parameters' bytes; sharded over {n} it would hold {1 / n:.0%}",
        )
    return None


def _compiled(ranks: Mapping[int, Seen]) -> Finding | Unseen | None:
    for rank, seen in ranks.items():
        compiled = seen.get("compiled", {})
        if not compiled.get("graphs"):
            return Finding("not-compiled", f"rank {rank}: Dynamo captured no graph, everything ran eagerly")
        if not compiled.get("compiled"):
            captured, compiler = compiled["graphs"], compiled.get("compiler", "its backend")
            return Finding("not-compiled", f"rank {rank}: Dynamo captured {captured} graphs, {compiler} compiled none")
        if seen.get("gave_up"):
            return Finding(
                "not-compiled",
                f"rank {rank}: Dynamo compiled {seen['gave_up']} again and again, for ever new shapes or values, and "
                "gave up: from then on what it had not met before ran eagerly",
            )
        if seen.get("backward_calls"):
            held, through = compiled.get("reached_bytes", 0), compiled.get("parameter_bytes", 0)
            words = "get their gradient from a compiled graph"
        else:
            held, through = seen.get("parameter_bytes", {}).get("local", 0), compiled.get("guarded_bytes")
            words = "are used by a compiled graph"
            if through is None:
                return Unseen("which parameters the compiled graphs use could not be seen")
        if through <= MAJORITY * held:
            return Finding("not-compiled", f"rank {rank}: {through / (held or 1):.0%} of the parameters' bytes {words}")
    return None


def units_per_step(progress: Iterable[Mapping[str, Any]]) -> float | None:
    """Examples or tokens of one step, from the lines of a rank (each counts since the line before it)."""
    lines = list(progress)
    for before, line in pairwise(lines):
        steps = line["step"] - before["step"]
        if line.get("units") and steps > 0:
            return float(line["units"]) / float(steps)
    if lines and lines[0].get("units") and lines[0]["step"] in (0, 1):
        return float(lines[0]["units"])
    return None
