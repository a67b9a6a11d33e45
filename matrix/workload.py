"""A workload: a folder with scripts, one baseline and its ports for each framework, and what they should compute."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Field

from matrix import accelerators, backends
from matrix.accuracy import PRECISIONS
from matrix.errors import UsageError, nearest
from matrix.journal import Layout, Reference
from matrix.schema import Match, Plain, Positive, Section, Text, Word, validate
from matrix.yamlfile import NUMBER, Document, Location, read, read_text, shown

SHIPPED = Path(__file__).parent.parent / "workloads"
FILE = "workload.yaml"
LAUNCHERS = ("torchrun",)
"""What can start a script that does not start as one process."""
FLAG = re.compile(r"-[!-~]*|\+{0,2}[\w.@/-]+=")
"""`--steps` takes its value as the next word, `--steps=` and `trainer.steps=` in the same."""
PROPERTIES = ("strategy", "devices", "nodes")
"""What a matcher can name besides axes: the properties of a layout."""
PASSED_SETTINGS = ("steps", "size", "seed", "dtype", "log_every")
"""The settings of `run` that a script can be given."""
_AS_TEXT: tuple[Location, ...] = (
    ("implementations", "*", "ports", "*", "for"),
    ("implementations", "*", "reference", "holds_for"),
    ("reference", "holds_for"),
)


@dataclass(frozen=True)
class Source:
    """A script of a workload.

    Attributes:
        file: its absolute path.
        name: its path relative to the workload's folder, with slashes.
        role: the script as written for one device, or a port of it.
        launch: one of `LAUNCHERS`, or None for a script that starts as one process.
        serves: of a port, the axes or properties of a layout and the values of the cells that it is for.
        written_for: of a baseline, the accelerator that it was written for, or "any".
        place: where the workload's file speaks of it.
        arguments: of a port, what is added to its command line: one file may serve several strategies.
    """

    file: Path
    name: str
    role: Literal["baseline", "port"]
    launch: str | None
    serves: Mapping[str, tuple[str, ...]]
    written_for: str
    place: Location
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """The scripts of one framework; `reference` is None where the workload's holds."""

    name: str
    baseline: Source
    ports: tuple[Source, ...]
    reference: Reference | None


@dataclass(frozen=True)
class Workload:
    """A workload as its file describes it; `arguments` maps settings to the flags that pass them.

    `progress` is a regular expression with the groups `step` and `loss`, or None for the usual `step=1 loss=2.3`.
    """

    name: str
    folder: Path
    unit: str
    implementations: Mapping[str, Implementation]
    arguments: Mapping[str, str]
    progress: str | None
    reference: Reference | None
    document: Document = field(repr=False, compare=False)

    def reference_of(self, implementation: Implementation) -> Reference | None:
        return implementation.reference or self.reference


class _Baseline(Section):
    file: Text
    written_for: Word = "any"
    launch: Text | None = None


class _Port(Section):
    file: Text
    launch: Text | None = None
    arguments: tuple[Text, ...] = ()
    serves: Match = Field(alias="for")


def _number(value: Any) -> Any:
    """`1e-5` in quotes is taken as the number, as YAML readers disagree on whether it is one without."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


Tolerance = Annotated[Positive, Field(lt=1), BeforeValidator(_number)]
"""Relative; one of 1 and more would let everything pass."""


class _Reference(Section):
    file: Text
    holds_for: dict[Literal["size", "seed", "dtype"], Plain] = Field(default_factory=dict)
    tolerance: Annotated[dict[Literal[PRECISIONS[::-1]], Tolerance], MinLen(1)]  # type: ignore[valid-type]


class _Implementation(Section):
    baseline: _Baseline
    ports: tuple[_Port, ...] = ()
    reference: _Reference | None = None


class _Workload(Section):
    about: Text
    unit: Literal["tokens", "examples"]
    implementations: Annotated[dict[Word, _Implementation], MinLen(1)]
    arguments: dict[Word, Text] = Field(default_factory=dict)
    progress: Text = "default"
    reference: _Reference | None = None


def find(name: str, search: list[Path]) -> Path:
    """The folder of a workload: the first of `search`, then of the shipped ones, that has it.

    Raises:
        UsageError: none has it; the message names the nearest workload there is, and where was looked.
    """
    roots = [*search, SHIPPED]
    for root in roots:
        if os.path.lexists(root / name / FILE):
            return root / name
    there = [each for root in roots for each in _listed(root) if os.path.isfile(root / each / FILE)]
    looked = ", ".join(str(each) for each in roots)
    raise UsageError(f"unknown workload '{name}': {nearest(name, there)} (looked for {FILE} under {looked})")


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def load(folder: Path) -> Workload:
    """The workload in a folder, checked: everything that it names is there and well formed.

    Raises:
        UsageError: a mistake in workload.yaml or in a reference; with its place.
    """
    document = read(folder / FILE, _AS_TEXT)
    model = validate(document, _Workload)
    _check_arguments(document, model.arguments)
    implementations = {
        name: Implementation(
            name,
            _baseline(document, each.baseline, ("implementations", name, "baseline")),
            tuple(
                _port(document, port, ("implementations", name, "ports", index))
                for index, port in enumerate(each.ports)
            ),
            _reference(document, each.reference, ("implementations", name, "reference")),
        )
        for name, each in model.implementations.items()
    }
    return Workload(
        name=folder.absolute().name,
        folder=folder.absolute(),
        unit=model.unit,
        implementations=implementations,
        arguments=model.arguments,
        progress=_progress(document, model.progress),
        reference=_reference(document, model.reference, ("reference",)),
        document=document,
    )


def matches(match: Mapping[str, tuple[str, ...]], axes: Mapping[str, str], layout: Layout) -> bool:
    """Whether a cell has, for each axis or property of its layout that `match` names, one of the values."""
    for name, values in match.items():
        if (str(getattr(layout, name)) if name in PROPERTIES else axes.get(name)) not in values:
            return False
    return True


def _baseline(document: Document, model: _Baseline, place: Location) -> Source:
    words = ["any", *accelerators.available()]
    if model.written_for not in words:
        hint = nearest(model.written_for, words)
        raise document.error(f"unknown accelerator '{model.written_for}': {hint}", (*place, "written_for"))
    file, name = _file(document, model.file, (*place, "file"))
    return Source(file, name, "baseline", _launch(document, model.launch, place), {}, model.written_for, place)


def _port(document: Document, model: _Port, place: Location) -> Source:
    file, name = _file(document, model.file, (*place, "file"))
    launch = _launch(document, model.launch, place)
    return Source(file, name, "port", launch, model.serves, "any", place, model.arguments)


def _launch(document: Document, launch: str | None, place: Location) -> str | None:
    if launch is not None and launch not in LAUNCHERS:
        raise document.error(f"unknown launcher {shown(launch)}: {nearest(launch, LAUNCHERS)}", (*place, "launch"))
    return launch


def _file(document: Document, name: str, place: Location) -> tuple[Path, str]:
    """A file that a workload names: a regular one in its folder, also when symbolic links are followed."""
    folder = document.path.parent.absolute()
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise document.error(f"expected a file in the workload's folder, got {shown(name)}", place)
    file = folder / relative
    if not os.path.isfile(file):
        what = "is no regular file" if os.path.lexists(file) else "does not exist"
        raise document.error(f"the file {shown(name)} {what}", place)
    if not file.resolve().is_relative_to(folder.resolve()):
        raise document.error(f"the file {shown(name)} is a link that leads out of the workload's folder", place)
    return file, relative.as_posix()


def _check_arguments(document: Document, arguments: Mapping[str, str]) -> None:
    flags = {flag for each in backends.available().values() for flag in each.flags}
    for name, flag in arguments.items():
        if name not in PASSED_SETTINGS and name not in flags:
            hint = nearest(name, [*PASSED_SETTINGS, *flags])
            raise document.error(f"unknown setting {shown(name)}: {hint}", ("arguments", name), key=True)
        if not FLAG.fullmatch(flag):
            message = f"expected a flag such as --steps, or a key such as trainer.steps=, got {shown(flag)}"
            raise document.error(message, ("arguments", name))


def _progress(document: Document, pattern: str) -> str | None:
    if pattern == "default":
        return None
    try:
        groups = set(re.compile(pattern).groupindex)
    except (re.error, RecursionError, OverflowError) as error:
        raise document.error(f"this is no regular expression: {error}", ("progress",)) from None
    for name in ("step", "loss"):
        if name not in groups:
            raise document.error(f"the expression has no group named '{name}': (?P<{name}>...)", ("progress",))
    return pattern


def _reference(document: Document, model: _Reference | None, place: Location) -> Reference | None:
    if model is None:
        return None
    file, _ = _file(document, model.file, (*place, "file"))
    loss, evaluations = read_reference(file)
    return Reference(
        loss=loss,
        eval=evaluations.pop(None, None),
        evaluations={step: value for step, value in evaluations.items() if step is not None},
        tolerance=dict(model.tolerance),
        holds_for={str(setting): value for setting, value in model.holds_for.items()},
    )


def read_reference(path: Path) -> tuple[list[tuple[int, float]], dict[int | None, float]]:
    """The rows `step,loss` of a reference, and its evaluations by step.

    The last row may be `eval,VALUE`, the evaluation after the last step (here under None); rows `eval@STEP,VALUE`
    before it give the evaluation of a run that ends after an earlier step.

    Raises:
        UsageError: it is not well formed; with the line.
    """
    lines = read_text(path).rstrip().split("\n")
    if lines[0].strip().replace(" ", "") != "step,loss":
        raise UsageError("the first line of a reference must be 'step,loss'", path, 1)
    loss: list[tuple[int, float]] = []
    evaluations: dict[int | None, float] = {}
    for number, line in enumerate(lines[1:], 2):
        first, _, second = (part.strip() for part in line.partition(","))
        if None in evaluations:
            raise UsageError("nothing may follow the row 'eval'", path, number)
        value = float(second) if NUMBER.fullmatch(second) else float("inf")
        if abs(value) == float("inf"):
            raise UsageError(f"expected a finite number after the comma, got {shown(second)}", path, number)
        evaluation = re.fullmatch("eval(?:@([0-9]{1,18}))?", first)
        if evaluation is not None:
            after = int(evaluation.group(1)) if evaluation.group(1) else None
            if after is not None and after not in dict(loss):
                raise UsageError(f"an evaluation after step {after}, which the reference does not have", path, number)
            evaluations[after] = value
            continue
        if evaluations:
            raise UsageError("a step after an evaluation; steps come first", path, number)
        if not re.fullmatch("[0-9]{1,18}", first):
            raise UsageError(f"expected a step or 'eval' before the comma, got {shown(first)}", path, number)
        if loss and int(first) <= loss[-1][0]:
            raise UsageError(f"steps must ascend, got {int(first)} after {loss[-1][0]}", path, number)
        loss.append((int(first), value))
    if not loss:
        raise UsageError("the reference has no steps", path, len(lines))
    return loss, evaluations
