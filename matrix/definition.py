"""The definition file: which cells there are, how they run, and what is known to fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import ConfigDict, Field, GetJsonSchemaHandler, PrivateAttr, model_validator
from pydantic_core import CoreSchema

from matrix import accelerators, backends, journal
from matrix.errors import UsageError, nearest
from matrix.evidence import targets
from matrix.failures import CAUSES
from matrix.schema import (
    Count,
    Day,
    Link,
    Match,
    OneOrMore,
    Plain,
    Positive,
    Seconds,
    Section,
    Text,
    Word,
    Words,
    validate,
    wrong,
)
from matrix.workload import PROPERTIES
from matrix.yamlfile import Document, Location, read, shown

SHIPPED = Path(__file__).parent / "definitions"
MAX_ENTRIES = 1000  # of exclude, include, override and expect: each is held against every cell
MAX_STEPS = 10**9
MAX_DEVICES = 1 << 20

Strategy = Literal["single", "data", "fully-sharded", "tensor", "hybrid"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
AXES = ("workload", "backend", "accelerator", "layout")
SINGLE = journal.Layout(name="single")

ErrorAt = Callable[[str, Location, bool], UsageError]
"""Makes an error from a message, a location in a file, and whether the key there is meant."""
_AS_TEXT: tuple[Location, ...] = (
    ("matrix",),
    ("exclude",),
    ("include",),
    ("override", "*", "match"),
    ("expect", "*", "match"),
    ("expect", "*", "until"),
    ("require",),
    ("run", "size"),
    ("run", "dtype"),
    ("override", "*", "run", "size"),
    ("override", "*", "run", "dtype"),
    ("evidence", "*", "*", "for"),
)
"""What YAML would take for a number or a boolean, but is a name here."""


class Matrix(Section):
    """The axes and their values; every combination is a cell. Further axes are declared under `axes`."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Words] = Field(init=False)

    workload: Words = Field(description="Folders with a workload.yaml: under the `workloads` paths, or shipped.")
    backend: Words = Field(description="How the scripts are executed: jax, torch, torch-compile, ...")
    accelerator: Words = Field(description="Kinds of device: cpu, cuda, rocm, tpu, ...")
    layout: Words = Field(description="`single`, or names from `layouts`.")

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The values of every axis, the further ones included."""
        return {name: getattr(self, name) for name in AXES} | (self.__pydantic_extra__ or {})


class Layout(Section):
    """Nodes x devices per node, and how the work is laid on them."""

    nodes: Count = Field(default=1, description="Number of machines.")
    devices: Count = Field(default=1, description="Devices per node.")
    strategy: Strategy = Field(default="single", description="How the work is laid on the devices.")

    @model_validator(mode="after")
    def _devices_suit_strategy(self) -> Layout:
        total = self.nodes * self.devices
        if total > MAX_DEVICES:
            raise wrong(f"{total:,} devices in all, expected at most {MAX_DEVICES:,}")
        if (self.strategy == "single") != (total == 1):
            wanted = "exactly one device" if self.strategy == "single" else "at least two devices"
            raise wrong(f"strategy '{self.strategy}' needs {wanted}, got nodes {self.nodes} x devices {self.devices}")
        return self


class Axis(Section):
    """How a script learns its cell's value of a further axis."""

    argument: Text | None = Field(default=None, description="The flag that passes the value, such as --dtype.")
    environment: Text | None = Field(default=None, description="The environment variable that holds the value.")

    @model_validator(mode="after")
    def _one_way(self) -> Axis:
        if (self.argument is None) == (self.environment is None):
            raise wrong("expected one of 'argument' (a flag) and 'environment' (a variable's name)")
        if self.argument is not None and not (self.argument.startswith("-") and self.argument.isprintable()):
            raise wrong(f"expected a flag such as --dtype, got {shown(self.argument)}", part="argument")
        if self.environment is not None and not (self.environment.isidentifier() and self.environment.isascii()):
            raise wrong(f"expected a variable's name, got {shown(self.environment)}", part="environment")
        return self


class Measure(Section):
    """How sources that passed are timed; the defaults give each process at least 10 intervals after compilation."""

    processes: Count = Field(default=3, description="Fresh processes per source; the process is the sample.")
    steps: Count = Field(default=120, description="Training steps of each process; no more than the reference has.")
    log_every: Count = Field(default=10, description="Steps between two progress lines; by default a twelfth of them.")


class Run(Section):
    """How a cell's scripts run. What a workload does not declare among its `arguments` is not passed."""

    size: Plain = Field(default="tiny", description="Passed on to the script.")
    steps: Count = Field(default=30, description="Training steps.")
    seed: int = Field(default=0, strict=True, ge=0, lt=2**32, description="Passed on to the script.")
    dtype: Plain = Field(default="float32", description="Passed on to the script; says which tolerance applies.")
    log_every: Count = Field(default=1, description="Steps between two progress lines.")
    timeout: Seconds = Field(default=300.0, description="Seconds that an attempt may take.")
    no_progress: Seconds = Field(default=120.0, description="Seconds without a progress line that mean a hang.")
    repeats: Count = Field(default=1, description="Runs of each source in the correctness phase; all must agree.")
    measure: Measure = Field(default=Measure(), description="How sources that passed are timed.")

    def merged(self, other: Run) -> Run:
        """These settings, with those that `other` sets explicitly in their place."""
        update = {name: getattr(other, name) for name in other.model_fields_set}
        if "measure" in update:
            set_there = {name: getattr(other.measure, name) for name in other.measure.model_fields_set}
            update["measure"] = self.measure.model_copy(update=set_there)
        return self.model_copy(update=update)

    def fitted(self, reference: journal.Reference | None) -> Run:
        """These settings, with defaults that reach no further than a workload's reference does."""
        measure, reach = self.measure, reference.reach if reference else MAX_STEPS
        update: dict[str, Any] = {}
        if "steps" not in self.model_fields_set:
            update["steps"] = min(self.steps, reach)
        measured: dict[str, Any] = {}
        if "steps" not in measure.model_fields_set:
            measured["steps"] = min(measure.steps, reach)
        if "log_every" not in measure.model_fields_set:
            # Twelve lines: two while the probes look, then ten intervals.
            measured["log_every"] = max(1, measured.get("steps", measure.steps) // 12)
        return self.model_copy(update={**update, "measure": measure.model_copy(update=measured)})


class Override(Section):
    """Other settings for some cells; later entries win."""

    match: Match = Field(description="Axes or properties of a layout, and the values that match.")
    run: Run = Field(description="The settings that differ.")


class Expect(Section):
    """A known failure; later entries win."""

    match: Match = Field(description="Axes or properties of a layout, and the values that match.")
    cause: Word = Field(description="The cause that is expected, such as wrong-result.")
    reason: Text = Field(description="Why, in a sentence.")
    until: Day | None = Field(default=None, description="The last day on which it holds.")
    link: Link | None = Field(default=None, description="Where the failure is discussed.")

    @property
    def expectation(self) -> journal.Expectation:
        until = self.until.isoformat() if self.until else None
        return journal.Expectation(cause=self.cause, reason=self.reason, until=until, link=self.link)


class Environment(Section):
    """Where a backend's packages are."""

    python: Text = Field(description="The interpreter, relative to the definition.")


class Target(Section):
    """Chips to compile for; a bare name is short for one with that name under `chips`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    chips: Word = Field(description="A TPU topology (v5e:2x2), a GPU (h100), or `any`: no particular chip.")
    num_slices: Count = Field(default=1, description="TPU slices, joined by a data-centre network.")
    serves: dict[Word, OneOrMore] = Field(default={}, alias="for", description="The cells that are compiled for it.")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        return {"chips": data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler.resolve_ref_schema(handler(core))]}


class Evidence(Section):
    """What to show of cells whose accelerator is absent: for each accelerator, the chips to compile for."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[list[Target], MinLen(1)]] = Field(init=False)

    timeout: Seconds = Field(default=600.0, description="Seconds that one source may take for one target.")
    memory_gib: Positive = Field(default=12.0, description="Memory that its processes may take, compiler included.")

    @property
    def targets(self) -> dict[str, list[Target]]:
        """By accelerator."""
        return self.__pydantic_extra__ or {}


class Definition(Section):
    """A matrix of training jobs: what runs where, and what is known to fail."""

    matrix: Matrix = Field(description="The axes and their values; every combination is a cell.")
    layouts: dict[Word, Layout] = Field(default={}, description="Layouts by name, besides `single`.")
    axes: dict[Word, Axis] = Field(default={}, description="Further axes, and how a script learns their values.")
    exclude: list[Match] = Field(default=[], max_length=MAX_ENTRIES, description="Cells that are removed.")
    include: list[dict[Word, Word]] = Field(
        default=[],
        max_length=MAX_ENTRIES,
        description="Complete cells that are added; their values need not be on the axes.",
    )
    run: Run = Field(default=Run(), description="How the cells' scripts run.")
    override: list[Override] = Field(default=[], max_length=MAX_ENTRIES, description="Other settings for some cells.")
    expect: list[Expect] = Field(default=[], max_length=MAX_ENTRIES, description="Known failures.")
    require: dict[Word, OneOrMore] = Field(default={}, description="Cells that must be executed.")
    evidence: Evidence = Field(default=Evidence(), description="What to show of cells whose accelerator is absent.")
    environments: dict[Word, Environment] = Field(
        default={},
        description="The interpreter of a backend's cells (`jax`), or of those on one accelerator (`jax-tpu`).",
    )
    workloads: list[Text] = Field(
        default=["workloads"],
        description="Folders of workloads, relative to the definition; the shipped come last.",
    )

    _document: Document | None = PrivateAttr(None)

    @property
    def path(self) -> Path | None:
        """Where it was read, as an absolute path without `..`, as pytest has it; messages name it as it was given."""
        return Path(os.path.abspath(self._document.path)) if self._document else None

    @property
    def name(self) -> str:
        return self.path.stem if self.path else "definition"

    @property
    def folder(self) -> Path:
        """What relative paths in the definition are relative to."""
        return (self.path.parent if self.path else Path()).absolute()

    @property
    def search(self) -> list[Path]:
        """The folders in which workloads are looked for before the shipped ones."""
        return [self.folder / os.path.expanduser(each) for each in self.workloads]

    def interpreter(self, backend: str) -> Path | None:
        """The interpreter that the definition names for a backend, if any; nothing says that it exists."""
        environment = self.environments.get(backend)
        return self.folder / os.path.expanduser(environment.python) if environment else None

    def layout(self, name: str) -> journal.Layout | None:
        found = self.layouts.get(name)
        if found is None:
            return SINGLE if name == SINGLE.name else None
        return journal.Layout(name=name, nodes=found.nodes, devices=found.devices, strategy=found.strategy)

    def error(self, message: str, location: Location = (), key: bool = False) -> UsageError:
        """The message as an error at the place of `location` in the file, to be raised."""
        return self._document.error(message, location, key) if self._document else UsageError(message)

    def vocabulary(self) -> dict[str, set[str]]:
        """For each axis and property of a layout, the values that mean something; workloads are those in the matrix."""
        layouts = [SINGLE.name, *self.layouts]
        known = {name: set(values) for name, values in self.matrix.axes.items()}
        for entry in self.include:
            for axis, value in entry.items():
                known.setdefault(axis, set()).add(value)
        known["backend"] = set(backends.available())
        known["accelerator"] = set(accelerators.available())
        known["layout"] = set(layouts)
        known["strategy"] = set(STRATEGIES)
        found = [self.layout(name) for name in layouts]
        known["devices"] = {str(each.devices) for each in found if each}
        known["nodes"] = {str(each.nodes) for each in found if each}
        return known


def load(name_or_path: str | Path) -> Definition:
    """The definition in a file, or the shipped one of that name.

    A bare word is a shipped definition before it is a file, so that a folder named `cpu` does not hide one.

    Raises:
        UsageError: there is no such definition, or a mistake in it; with its place.
    """
    document = read(_find(os.fspath(name_or_path)), _AS_TEXT)
    definition = validate(document, Definition)
    definition._document = document
    _check(definition)
    return definition


def shipped() -> list[str]:
    """The names of the definitions that come with the tool."""
    return sorted(each.stem for each in SHIPPED.glob("*.yaml"))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a definition file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Definition.model_json_schema()}


def environment_names(backends: Iterable[str], accelerators: Iterable[str]) -> list[str]:
    """What an interpreter can be named for: a backend, or a backend on one accelerator."""
    accelerators = list(accelerators)
    return [*backends, *(f"{backend}-{each}" for backend in backends for each in accelerators)]


def _find(name: str) -> Path:
    names = shipped()
    if name in names:
        return SHIPPED / f"{name}.yaml"
    if os.path.lexists(name):
        return Path(name)
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if os.sep in stem:
        raise UsageError("there is no such file", name)
    near = nearest(stem, names)
    listed = f"shipped: {', '.join(names)}; others are given by their path"
    hint = f"{near} ({listed})" if near.startswith("did") else listed
    raise UsageError(f"there is no definition {shown(name)}: {hint}")


def _check(definition: Definition) -> None:
    """What only the definition as a whole can tell: that its names mean something."""
    _check_axes(definition)
    known = definition.vocabulary()
    for axis, values in definition.matrix.axes.items():
        for index, value in enumerate(values):
            _check_word(definition.error, axis, value, known[axis], ("matrix", axis, index))
    complete = list(definition.matrix.axes)
    for index, entry in enumerate(definition.include):
        place: Location = ("include", index)
        for axis, value in entry.items():
            if axis not in complete:
                raise definition.error(f"unknown axis '{axis}': {nearest(axis, complete)}", (*place, axis), True)
            _check_word(definition.error, axis, value, known[axis], (*place, axis))
        missing = [axis for axis in complete if axis not in entry]
        if missing:
            raise definition.error(f"an included cell must be complete: '{missing[0]}' is missing", place)
    for index, match in enumerate(definition.exclude):
        _check_match(definition.error, match, known, ("exclude", index))
    for index, override in enumerate(definition.override):
        _check_match(definition.error, override.match, known, ("override", index, "match"))
    for index, expect in enumerate(definition.expect):
        _check_match(definition.error, expect.match, known, ("expect", index, "match"))
        _check_word(definition.error, "cause", expect.cause, CAUSES, ("expect", index, "cause"))
    _check_match(definition.error, definition.require, known, ("require",))
    owners = environment_names(known["backend"], known["accelerator"])
    for name in definition.environments:
        _check_word(definition.error, "backend", name, owners, ("environments", name), True)
    for accelerator, wanted in definition.evidence.targets.items():
        place = ("evidence", accelerator)
        _check_word(definition.error, "accelerator", accelerator, known["accelerator"], place, True)
        for index, target in enumerate(wanted):
            _check_match(definition.error, target.serves, known, (*place, index, "for"))
            try:
                targets.describe(accelerator, target.chips, target.num_slices)
            except UsageError as error:
                raise definition.error(error.message, (*place, index)) from None
    if "workloads" in definition.model_fields_set:
        for index, folder in enumerate(definition.search):
            if not os.path.isdir(folder):
                raise definition.error(f"there is no folder '{folder}'", ("workloads", index))


def _check_axes(definition: Definition) -> None:
    if SINGLE.name in definition.layouts:
        raise definition.error("the layout 'single' is built in: choose another name", ("layouts", "single"), True)
    for name in definition.axes:
        if name in AXES or name in PROPERTIES:
            raise definition.error(f"'{name}' is built in: choose another name", ("axes", name), True)
        if name not in definition.matrix.axes:
            raise definition.error(f"the axis '{name}' has no values under 'matrix'", ("axes", name), True)
    for name in definition.matrix.axes:
        if name not in AXES and name not in definition.axes:
            hint = nearest(name, [*AXES, *definition.axes])
            hint = hint if hint.startswith("did") else "a further axis is declared under 'axes'"
            raise definition.error(f"unknown axis {shown(name)}: {hint}", ("matrix", name), True)


def _check_word(
    error: ErrorAt, what: str, value: str, known: Iterable[str], place: Location, key: bool = False
) -> None:
    if value not in known:
        raise error(f"unknown {what} '{value}': {nearest(value, known)}", place, key)


def _check_match(
    error: ErrorAt, match: Mapping[str, Iterable[str]], known: Mapping[str, Iterable[str]], place: Location
) -> None:
    """Refuse a matcher with an axis or a value that means nothing, at its place in the file.

    A workload that is not in the matrix is accepted: a definition may know failures of more than it runs.
    """
    for axis, values in match.items():
        if axis not in known:
            raise error(f"unknown axis '{axis}': {nearest(axis, known)}", (*place, axis), True)
        for index, value in enumerate(values):
            if axis != "workload":
                _check_word(error, axis, value, known[axis], (*place, axis, index))
