"""From a definition to its cells: the product of the axes, minus exclude, plus include, each with all that it needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from matrix import accelerators, backends, journal, workload
from matrix.accelerators import Accelerator
from matrix.accuracy import BY_DTYPE, tolerance
from matrix.backends import Backend
from matrix.definition import AXES, Definition, Evidence, Run
from matrix.errors import UsageError, nearest
from matrix.evidence import targets
from matrix.workload import Implementation, Source, Workload, matches
from matrix.yamlfile import Location, shown

MAX_CELLS = 100_000


@dataclass(frozen=True)
class Cell:
    """One point of the matrix.

    Attributes:
        id: `workload/backend/accelerator/layout`, then `/NAME=VALUE` for each further axis, sorted.
        axes: the value on each axis.
        implementation: the scripts that its backend runs; None when the workload has none for it.
        run: its settings, overrides applied.
        arguments: what further axes add to the script's command line.
        environment: the variables that further axes set.
        expectation: its known failure.
        required: whether the definition requires it to be executed.
        targets: what it is compiled for where its accelerator is absent.
        limits: of that.
    """

    id: str
    axes: Mapping[str, str]
    layout: journal.Layout
    workload: Workload
    backend: Backend
    accelerator: Accelerator
    implementation: Implementation | None
    run: Run
    arguments: list[str]
    environment: Mapping[str, str]
    expectation: journal.Expectation | None
    required: bool
    targets: tuple[journal.Target, ...] = ()
    limits: Evidence = field(default_factory=Evidence)

    def sources(self) -> tuple[Source | None, tuple[Source, ...]]:
        """The baseline, and the ports that serve this cell in the order of the workload's file."""
        if self.implementation is None:
            return None, ()
        ports = (port for port in self.implementation.ports if matches(port.serves, self.axes, self.layout))
        return self.implementation.baseline, tuple(ports)

    @property
    def reference(self) -> journal.Reference | None:
        """What its losses are held against; None where the workload has nothing for these settings."""
        found = self.workload.reference_of(self.implementation) if self.implementation else None
        if found and any(str(getattr(self.run, name)) != value for name, value in found.holds_for.items()):
            return None
        return found

    def planned(self) -> journal.PlannedCell:
        """The cell as a journal's first record lists it."""
        baseline, ports = self.sources()
        return journal.PlannedCell(
            cell=self.id,
            axes=dict(self.axes),
            layout=self.layout,
            unit=self.workload.unit,
            written_for=self.implementation.baseline.written_for if self.implementation else None,
            expectation=self.expectation,
            required=self.required,
            sources=tuple(each.name for each in (baseline, *ports) if each),
        )


@dataclass(frozen=True)
class Plan:
    """The cells of a definition in the order in which it writes them, and what is odd about it but no error."""

    definition: Definition
    cells: tuple[Cell, ...]
    notices: tuple[str, ...] = ()
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def select(self, text: str) -> Plan:
        """The cells that `text` names: `backend=torch|jax,layout=dp2`, exact by axis or property of a layout.

        Several values of an axis are joined by "|", or the axis is repeated.

        Raises:
            UsageError: an axis or value that no cell has, or a combination that no cell has.
        """
        wanted: dict[str, tuple[str, ...]] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            axis, equals, values = part.partition("=")
            if not equals:
                raise UsageError(f"--select: expected AXIS=VALUE, got {shown(part)}")
            wanted[axis.strip()] = (*wanted.get(axis.strip(), ()), *(each.strip() for each in values.split("|")))
        there: dict[str, set[str]] = {}
        for cell in self.cells:
            for axis, value in {**cell.axes, **_properties(cell.layout)}.items():
                there.setdefault(axis, set()).add(value)
        for axis, chosen in wanted.items():
            if axis not in there:
                raise UsageError(f"--select: unknown axis {shown(axis)}: {nearest(axis, there)}")
            for value in chosen:
                if value not in there[axis]:
                    hint = nearest(value, there[axis])
                    raise UsageError(f"--select: no cell has {axis} {shown(value)}: {hint}")
        cells = tuple(cell for cell in self.cells if matches(wanted, cell.axes, cell.layout))
        if not cells:
            raise UsageError(f"--select: none of the {len(self.cells)} cells is {shown(text)}")
        return replace(self, cells=cells, chosen={**self.chosen, **wanted})

    @property
    def selection(self) -> str:
        """What was selected, as `select` takes it; empty when all cells are there."""
        return selection_text(self.chosen)


def selection_text(chosen: Mapping[str, tuple[str, ...]]) -> str:
    """The values chosen on each axis, as `Plan.select` takes them."""
    return ",".join(f"{axis}={'|'.join(values)}" for axis, values in chosen.items())


def plan(definition: Definition) -> Plan:
    """Every cell of a definition.

    Raises:
        UsageError: the definition's cells cannot be run as it says, or a workload is not well formed; with the place.
    """
    return _Planner(definition).plan()


class _Planner:
    def __init__(self, definition: Definition):
        self.definition = definition
        self.axes = definition.matrix.axes
        self.backends = backends.available()
        self.accelerators = accelerators.available()
        self.known = definition.vocabulary()
        self.workloads: dict[str, Workload] = {}
        self.runs: dict[tuple[int, ...], Run] = {}
        self.notices: list[str] = []
        self.checked: set[tuple[Any, ...]] = set()

    def plan(self) -> Plan:
        definition = self.definition
        product = math.prod(len(values) for values in self.axes.values())
        if product + len(definition.include) > MAX_CELLS:
            raise definition.error(f"the matrix has {product:,} cells, expected at most {MAX_CELLS:,}", ("matrix",))
        for index, name in enumerate(self.axes["workload"]):
            self.load(name, ("matrix", "workload", index))
        for index, entry in enumerate(definition.include):
            self.load(entry["workload"], ("include", index, "workload"))
        points = list(self.points())
        cells = tuple(self.cell(axes, layout) for axes, layout in points)
        self.report_unmatched(points)
        return Plan(definition, cells, tuple(self.notices))

    def load(self, name: str, place: Location) -> None:
        if name in self.workloads:
            return
        try:
            folder = workload.find(name, self.definition.search)
        except UsageError as error:
            raise self.definition.error(error.message, place) from None
        loaded = self.workloads[name] = workload.load(folder)
        for implementation in loaded.implementations.values():
            for port in implementation.ports:
                self.check_port(loaded, port)

    def check_port(self, job: Workload, port: Source) -> None:
        """Refuse a port that says it is for cells which there cannot be."""
        for axis, values in port.serves.items():
            place = (*port.place, "for", axis)
            if axis not in self.known:
                raise job.document.error(f"unknown axis '{axis}': {nearest(axis, self.known)}", place, key=True)
            for index, value in enumerate(values):
                if value not in self.known[axis] and axis not in ("devices", "nodes"):
                    hint = nearest(value, self.known[axis])
                    raise job.document.error(f"unknown {axis} '{value}': {hint}", (*place, index))

    def layout(self, name: str) -> journal.Layout:
        found = self.definition.layout(name)
        assert found is not None, name  # the definition's words are checked when it is loaded
        return found

    def points(self) -> Iterator[tuple[dict[str, str], journal.Layout]]:
        """The axes and the layout of every cell, without repeats."""
        definition = self.definition
        layouts = {name: self.layout(name) for name in self.known["layout"]}
        used = [False] * len(definition.exclude)
        seen: set[tuple[str, ...]] = set()
        for values in itertools.product(*self.axes.values()):
            axes = dict(zip(self.axes, values, strict=True))
            layout = layouts[axes["layout"]]
            hits = [index for index, match in enumerate(definition.exclude) if matches(match, axes, layout)]
            for index in hits:
                used[index] = True
            if not hits:
                seen.add(values)
                yield axes, layout
        self.notice(("exclude", index) for index, hit in enumerate(used) if not hit)
        if not seen and not definition.include:
            raise definition.error("no cell is left: 'exclude' removes them all", ("exclude",))
        for index, entry in enumerate(definition.include):
            values = tuple(entry[axis] for axis in self.axes)
            if values in seen:
                self.notices.append(f"{self.where(('include', index))}: this cell is there already")
                continue
            seen.add(values)
            yield dict(zip(self.axes, values, strict=True)), layouts[entry["layout"]]

    def cell(self, axes: dict[str, str], layout: journal.Layout) -> Cell:
        definition = self.definition
        further = sorted(set(axes) - set(AXES))
        backend = self.backends[axes["backend"]]
        job = self.workloads[axes["workload"]]
        implementation = job.implementations.get(backend.name) or job.implementations.get(backend.framework)
        overrides = tuple(i for i, each in enumerate(definition.override) if matches(each.match, axes, layout))
        run = self.run(overrides)
        arguments: list[str] = []
        environment: dict[str, str] = {}
        for name in further:
            how = definition.axes[name]
            setting = next((key for key in workload.PASSED_SETTINGS if job.arguments.get(key) == how.argument), None)
            if how.environment is not None:
                environment[how.environment] = axes[name]
            elif setting is not None:
                run = self.set(run, setting, axes, name)
            elif how.argument is not None:
                arguments += [how.argument, axes[name]]
        expected = [each.expectation for each in definition.expect if matches(each.match, axes, layout)]
        cell = Cell(
            id="/".join([*(axes[name] for name in AXES), *(f"{name}={axes[name]}" for name in further)]),
            axes=axes,
            layout=layout,
            workload=job,
            backend=backend,
            accelerator=self.accelerators[axes["accelerator"]],
            implementation=implementation,
            run=run.fitted(job.reference_of(implementation) if implementation else None),
            arguments=arguments,
            environment=environment,
            expectation=expected[-1] if expected else None,
            required=bool(definition.require) and matches(definition.require, axes, layout),
            targets=tuple(self.targets(axes, layout)),
            limits=definition.evidence,
        )
        self.check_sources(cell)
        self.check(cell, overrides)
        return cell

    def check_sources(self, cell: Cell) -> None:
        """Refuse one file twice in a cell: attempts are told apart by the name of their source."""
        baseline, ports = cell.sources()
        seen = {baseline.name} if baseline else set()
        for port in ports:
            if port.name in seen:
                message = f"{shown(port.name)} is there twice for {cell.id}: narrow 'for', or give the port a file"
                raise cell.workload.document.error(message, (*port.place, "file"))
            seen.add(port.name)

    def targets(self, axes: Mapping[str, str], layout: journal.Layout) -> Iterator[journal.Target]:
        for each in self.definition.evidence.targets.get(axes["accelerator"], ()):
            if matches(each.serves, axes, layout):
                yield targets.describe(axes["accelerator"], each.chips, each.num_slices)

    def run(self, overrides: tuple[int, ...]) -> Run:
        if overrides not in self.runs:
            run = self.definition.run
            for index in overrides:
                run = run.merged(self.definition.override[index].run)
            self.runs[overrides] = run
        return self.runs[overrides]

    def set(self, run: Run, setting: str, axes: Mapping[str, str], axis: str) -> Run:
        """The settings with one that an axis gives by the very flag with which the workload takes it."""
        text = axes[axis]
        if setting in ("steps", "log_every"):  # a measurement has its own
            message = f"'{setting}' is no axis: the run decides it, and a measurement decides otherwise"
            raise self.definition.error(message, ("axes", axis, "argument"))
        value = int(text) if setting == "seed" and text.isascii() and text.isdigit() and len(text) < 12 else text
        try:
            return run.merged(Run.model_validate({setting: value}))
        except ValidationError:
            message = f"{shown(text)} is no value for the setting '{setting}'"
            raise self.definition.error(message, self.on_axis(axis, text)) from None

    def check(self, cell: Cell, overrides: tuple[int, ...]) -> None:
        """Refuse settings of a cell that its scripts cannot follow or its reference does not reach."""
        run, job, reference = cell.run, cell.workload, cell.reference
        done = (job.name, id(reference), overrides, run.steps, run.log_every, run.dtype)
        if done in self.checked:
            return
        self.checked.add(done)
        phases: list[tuple[tuple[str, ...], int, int]] = [
            ((), run.steps, run.log_every),
            (("measure",), run.measure.steps, run.measure.log_every),
        ]
        for phase, steps, log_every in phases:
            if log_every > steps:
                message = f"log_every is {log_every}, but there are {steps} steps: nothing would be logged"
                raise self.definition.error(message, self.setting(cell, overrides, *phase, "log_every"))
            if reference and steps > reference.reach:
                message = f"{steps} steps, but the reference of {job.name} ends at step {reference.loss[-1][0]}"
                raise self.definition.error(message, self.setting(cell, overrides, *phase, "steps"))
        if reference and "dtype" in job.arguments:
            place = self.setting(cell, overrides, "dtype")
            precision = BY_DTYPE.get(run.dtype)
            if precision is None:
                hint = nearest(run.dtype, BY_DTYPE)
                raise self.definition.error(f"unknown dtype {shown(run.dtype)}: {hint}", place)
            if tolerance(reference, precision) is None:
                there = ", ".join(reference.tolerance)
                message = f"dtype {run.dtype} needs a tolerance for {precision}, but {job.name} has only {there}"
                raise self.definition.error(message, place)

    def setting(self, cell: Cell, overrides: Sequence[int], *part: str) -> Location:
        """Where the definition sets what holds for a cell: on an axis, else in the last override, else in `run`."""
        for name, how in self.definition.axes.items():
            if how.argument is not None and how.argument == cell.workload.arguments.get(part[0]):
                return self.on_axis(name, cell.axes[name])
        for index in reversed(overrides):
            if part[0] in self.definition.override[index].run.model_fields_set:
                return ("override", index, "run", *part)
        if part[0] in self.definition.run.model_fields_set:
            return ("run", *part)
        return self.on_axis("workload", cell.workload.name)  # a default does not suit the workload

    def on_axis(self, axis: str, value: str) -> Location:
        values = self.axes[axis]
        return ("matrix", axis, values.index(value)) if value in values else ("include",)

    def report_unmatched(self, points: Sequence[tuple[dict[str, str], journal.Layout]]) -> None:
        matchers: list[tuple[Location, Mapping[str, tuple[str, ...]]]] = [
            *((("override", i, "match"), each.match) for i, each in enumerate(self.definition.override)),
            *((("expect", i, "match"), each.match) for i, each in enumerate(self.definition.expect)),
            *(
                (("evidence", accelerator, i), {**each.serves, "accelerator": (accelerator,)})
                for accelerator, wanted in self.definition.evidence.targets.items()
                for i, each in enumerate(wanted)
            ),
        ]
        required = self.definition.require
        if len(required) > 1:
            matchers.append((("require",), required))
        for axis, values in required.items():
            matchers += [(("require", axis, index), {axis: (value,)}) for index, value in enumerate(values)]
        self.notice(place for place, match in matchers if not any(matches(match, *point) for point in points))

    def notice(self, unmatched: Iterator[Location]) -> None:
        self.notices += [f"{self.where(place)}: this matches no cell" for place in unmatched]

    def where(self, place: Location) -> str:
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        return str(self.definition.error(name, place))


def _properties(layout: journal.Layout) -> dict[str, str]:
    return {name: str(getattr(layout, name)) for name in workload.PROPERTIES}
