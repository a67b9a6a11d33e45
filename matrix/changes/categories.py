"""What a changed line is for: the API names that it touches, and the category in which `matrix.changes.apis` has them.

Names are resolved through the file's own imports (`import torch.distributed as dist`) and through assignments of what
a file keeps under a name of its own (`rank = dist.get_rank()`): a rank, a device, a mesh. Where a line touches names
of several categories, the first one in `apis.CATEGORIES` counts. Of a line that replaces another, only what is new in
it counts, as long as that says anything: `autocast("cuda")` that becomes `autocast(device.type)` is device placement.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from matrix.changes import Comparison, Hunk
from matrix.changes.apis import (
    CATEGORIES,
    COMMUNICATION,
    CONTROL,
    DEVICE,
    IMPORTS,
    KEPT,
    LAUNCH,
    OTHER,
    SHARDING,
    category_of,
    longest,
)
from matrix.changes.script import Script, Unit

ALIKE = 0.5
"""How similar two lines are, from 0 to 1 as `difflib` says, of which one replaces the other."""
DEVICES = ("cuda", "xpu", "mps", "npu", "xla", "hpu", "tpu", "gpu")
"""Texts such as `"cuda:0"` that name a device."""
AROUND = 30
"""How far from its place in a hunk a line is looked for that replaces another,"""
LONG = 300
"""and how many of its characters are compared."""
_ENVIRON = ("os.environ", "os.getenv", "os.environ.get", "os.environ.setdefault")


@dataclass
class Names:
    """What the names of one file stand for."""

    known: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Script) -> Names:
        names = cls()
        for unit in source.units:
            names.learn(unit.node)
        return names

    def learn(self, node: ast.AST) -> None:
        """Take in an import or an assignment."""
        match node:
            case ast.Import():
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.known[bound] = frozenset({alias.name if alias.asname else bound})
            case ast.ImportFrom(module=module) if module and not node.level:
                for alias in node.names:
                    self.known[alias.asname or alias.name] = frozenset({f"{module}.{alias.name}"})
            case ast.Assign(targets=[target], value=value):
                self.keep(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.keep(target, value)

    def keep(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, its in zip(targets, values, strict=True):
                    self.keep(each, its)
            case ast.Tuple(elts=targets), _:
                for each in targets:
                    self.keep(each, value)
            case ast.Name(id=name), _:
                found = frozenset(self.kept(value))
                if found:
                    self.known[name] = self.known.get(name, frozenset()) | found

    def kept(self, value: ast.expr) -> Iterator[str]:
        """The API names whose result a value is, or is computed from as ranks and devices are."""
        match value:
            case ast.Call(func=ast.Name(id="int" | "str" | "bool" | "max" | "min"), args=args):
                for each in args:
                    yield from self.kept(each)
            case ast.Compare(left=left):
                yield from self.kept(left)
            case ast.BoolOp(values=values):
                for each in values:
                    yield from self.kept(each)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.kept(body)
                yield from self.kept(orelse)
            case ast.UnaryOp(operand=operand):
                yield from self.kept(operand)
            case _:
                resolved = [
                    *self.environment(value),
                    *self.dotted(value.func if isinstance(value, ast.Call) else value),
                ]
                for name in resolved:
                    if name.startswith("environ:") or longest(KEPT, name):
                        yield name

    def environment(self, node: ast.AST) -> Iterator[str]:
        """The environment variable that an expression reads or sets."""
        match node:
            case ast.Subscript(value=where, slice=ast.Constant(value=str(name))):
                pass
            case ast.Call(func=where, args=[ast.Constant(value=str(name)), *_]):
                pass
            case _:
                return
        if any(each in _ENVIRON for each in self.dotted(where)):
            yield f"environ:{name}"

    def dotted(self, node: ast.AST) -> Iterator[str]:
        """What an expression such as `dist.get_rank` stands for."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            for name in self.known.get(node.id, ()):
                yield ".".join([name, *reversed(path)])

    def touched(self, unit: Unit) -> Iterator[str]:
        """Every name that a line touches, resolved; methods of unknown objects as `.name`."""
        if isinstance(unit.node, ast.Import | ast.ImportFrom):
            for alias in unit.node.names:
                module = getattr(unit.node, "module", None)
                yield f"{module}.{alias.name}" if module else alias.name
            return
        inner = {node.value for node in ast.walk(unit.node) if isinstance(node, ast.Attribute)}
        for node in ast.walk(unit.node):
            yield from self.environment(node)
            if isinstance(node, ast.Subscript) and any(map(_is_rank, self.inside(node.slice))):
                yield "rank in a subscript"
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.partition(":")[0] in DEVICES
            ):
                yield f"device:{node.value}"
            if node in inner or not isinstance(node, ast.Attribute | ast.Name):
                continue
            resolved = list(self.dotted(node))
            yield from resolved
            if isinstance(node, ast.Attribute) and not any(category_of(name) for name in resolved):
                yield f".{node.attr}"

    def inside(self, node: ast.AST) -> Iterator[str]:
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute | ast.Name):
                yield from self.dotted(each)


_RANKS = ("get_rank", "get_world_size", "process_index", "process_count", "RANK", "WORLD_SIZE", "get_ordinal")


def _is_rank(name: str) -> bool:
    return category_of(name) == LAUNCH and name.replace(":", ".").endswith(_RANKS)


def _category(names: Iterable[str]) -> str | None:
    """The first category, in the order of precedence, that some names have."""
    found = set()
    for name in names:
        if name == "rank in a subscript":  # `batch[rank::world_size]` is how a rank takes its share of the data
            found.add(SHARDING)
        elif name.startswith("device:"):
            found.add(DEVICE)
        elif category := category_of(name):
            found.add(category)
    return next((category for category in CATEGORIES if category in found), None)


def _communicates(names: Iterable[str]) -> bool:
    return any(category_of(name) in COMMUNICATION for name in names)


@dataclass(frozen=True)
class Line:
    """A changed line: its category, and whether it is communication code."""

    unit: Unit
    category: str
    communication: bool


@dataclass(frozen=True)
class Sorted:
    """The lines of a hunk in their categories."""

    hunk: Hunk
    deleted: tuple[Line, ...]
    added: tuple[Line, ...]

    @property
    def categories(self) -> Counter[str]:
        """Changed lines, added and deleted, by category."""
        return Counter(line.category for line in (*self.deleted, *self.added))

    @property
    def communication(self) -> int:
        """Added lines of communication code."""
        return sum(line.communication for line in self.added)


def sort(comparison: Comparison) -> list[Sorted]:
    """Every hunk with each of its lines in a category."""
    before, after = Names.of(comparison.baseline), Names.of(comparison.port)
    found = []
    for hunk in comparison.hunks:
        old = [tuple(before.touched(unit)) for unit in hunk.deleted]
        new = [tuple(after.touched(unit)) for unit in hunk.added]
        added = _added(hunk, new, {name for each in old for name in each})
        found.append(Sorted(hunk, _deleted(hunk, old, {name for each in new for name in each}, added), added))
    return found


def _added(hunk: Hunk, names: Sequence[Sequence[str]], elsewhere: set[str]) -> tuple[Line, ...]:
    moved = {unit.text for unit in hunk.deleted}
    lines: list[Line] = []
    for unit, its in zip(hunk.added, names, strict=True):
        category = _own(unit, its, elsewhere)
        if unit.text in moved:  # into a block or out of one
            around = next((line for line in reversed(lines) if line.unit.depth < unit.depth), None)
            category = around.category if around else CONTROL
        elif category is None:
            category = CONTROL if _steers(unit.node) else OTHER
        lines.append(Line(unit, category, _communicates(its)))
    return tuple(lines)


def _deleted(
    hunk: Hunk, names: Sequence[Sequence[str]], elsewhere: set[str], added: Sequence[Line]
) -> tuple[Line, ...]:
    """Lines of the baseline; one that touches nothing of its own belongs to the line that replaces it."""
    lines = []
    texts = {line.unit.text for line in added}
    around = AROUND if len(names) <= 10 * AROUND else 1  # of another program, no line replaces one
    for index, (unit, its) in enumerate(zip(hunk.deleted, names, strict=True)):
        category = _own(unit, its, elsewhere)
        if category is None or unit.text in texts:
            matcher = difflib.SequenceMatcher(None, "", unit.text[:LONG], autojunk=False)
            near = {}
            for line in added[max(0, index - around) : index + around]:
                matcher.set_seq1(line.unit.text[:LONG])
                near[matcher.ratio()] = line.category
            closest = max(near, default=0.0)
            category = near[closest] if closest >= ALIKE else CONTROL if _steers(unit.node) else OTHER
        lines.append(Line(unit, category, _communicates(its)))
    return tuple(lines)


def _own(unit: Unit, names: Sequence[str], elsewhere: set[str]) -> str | None:
    """A line's category by what it touches and the other side of the hunk does not, else by all that it touches."""
    if isinstance(unit.node, ast.Import | ast.ImportFrom):
        return IMPORTS
    return _category(name for name in names if name not in elsewhere) or _category(names)


def _steers(node: ast.AST) -> bool:
    return isinstance(
        node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match | ast.match_case | ast.Break | ast.Continue
    )


def total(found: Iterable[Sorted]) -> Counter[str]:
    """Changed lines by category over some hunks, in the order of `apis.CATEGORIES`."""
    counts: Counter[str] = Counter()
    for each in found:
        counts += each.categories
    return Counter({name: counts[name] for name in CATEGORIES if counts[name]})


def communication(found: Iterable[Sorted]) -> int:
    """Added lines that touch ranks, process groups, collectives, barriers or rendezvous, over some hunks."""
    return sum(each.communication for each in found)
