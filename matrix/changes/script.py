"""A Python source as a sequence of units: simple statements, headers of compound ones, decorators; with their lines."""

from __future__ import annotations

import ast
import copy
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matrix.errors import UsageError

MAX_BYTES = 1 << 20  # hand-written scripts are a hundred times smaller; comparing is quadratic at worst
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # Python's line ends, which `str.splitlines` has more of

Position = tuple[int, int]
"""A line, from 1, and a column in bytes, as `ast` counts."""


@dataclass(frozen=True)
class Unit:
    """A statement, or the part of one that stands on lines of its own.

    Attributes:
        depth: how deep it is nested, in blocks.
        text: its code in one formatting, without comments.
        first: its first line, counted from 0.
        end: the line after its last one; a docstring belongs to the header above it.
        node: its part of the syntax tree, without what is nested in it.
        opens: whether a block must follow (a header without a docstring).
        shared: whether it begins on the line on which the unit before it ends (`a = 1; b = 2`).
    """

    depth: int
    text: str
    first: int
    end: int
    node: ast.AST = field(repr=False, compare=False)
    opens: bool = False
    shared: bool = False

    @property
    def same(self) -> tuple[int, str]:
        """What is equal of two units that differ in layout only."""
        return self.depth, self.text


@dataclass(frozen=True)
class Script:
    """A source that parses.

    Attributes:
        lines: as they are written, with their ends.
        units: in the order of the file.
        prologue: how many lines at the top belong to no unit: the module's docstring, a shebang, an encoding.
        newline: the end of its first line.
        encoding: by its byte order mark or its declaration (PEP 263).
    """

    lines: tuple[str, ...]
    units: tuple[Unit, ...]
    prologue: int
    newline: str
    encoding: str = "utf-8"

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def lead(self, index: int) -> int:
        """The first of the lines that go with a unit: comments and blank lines above it are its own."""
        return self.units[index - 1].end if index else self.prologue


def read(path: Path) -> Script:
    """The source in a file.

    Raises:
        UsageError: there is none, it is a notebook, it is no text, or it does not parse; with its place.
    """
    data = read_bytes(path)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        if isinstance(error, SyntaxError) and error.msg.startswith("unknown encoding"):
            raise UsageError(f"it declares an {error.msg}", path, 1) from None
        if isinstance(error, SyntaxError):  # in the first two lines
            encoding, line = "utf-8", 1
        else:
            line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"this is no {encoding} text; other encodings are declared (PEP 263)", path, line) from None
    return parse(text, path, encoding)


def read_bytes(path: Path) -> bytes:
    """The bytes of a script, which are not too many.

    Raises:
        UsageError: there is no such file, or it cannot be a script.
    """
    if path.suffix == ".ipynb":
        raise UsageError("this is a notebook; `jupyter nbconvert --to script` makes a script of it", path)
    try:
        if path.exists() and not path.is_file():
            raise UsageError("expected a Python script, this is no regular file", path)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", path) from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"larger than {MAX_BYTES >> 20} MiB, which no script is", path)
    return data


def parse(text: str, path: Path | None = None, encoding: str = "utf-8") -> Script:
    """The units of a source.

    Raises:
        UsageError: it does not parse.
    """
    try:
        tree = ast.parse(text)
        return _Reader(text, encoding).read(tree)
    except SyntaxError as error:
        # A SyntaxError's column counts from 1, and is 0 where there is none.
        raise UsageError(f"this does not parse: {error.msg}", path, error.lineno, error.offset or None) from None
    except ValueError as error:
        raise UsageError(f"this does not parse: {error}", path) from None
    except (RecursionError, MemoryError):
        raise UsageError("this does not parse: it is nested too deeply", path) from None


def split(text: str) -> list[str]:
    """The lines of a text with their ends, as Python counts lines."""
    return _LINE.findall(text)


def parses(text: str) -> bool:
    """Whether a text is Python."""
    try:
        compile(text, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class _Reader:
    def __init__(self, text: str, encoding: str):
        self.lines = split(text)
        self.encoding = encoding
        self.units: list[Unit] = []
        self.prologue = 0

    def read(self, tree: ast.Module) -> Script:
        body = tree.body
        if body and _is_text(body[0]):
            self.prologue = body[0].end_lineno or 0
            if len(body) > 1 and body[1].lineno == self.prologue:
                self.prologue -= 1  # `"""..."""; import os` on one line
            body = body[1:]
        elif body:
            for line in self.lines[:2]:  # where a shebang and an encoding can stand
                if not line.startswith("#"):
                    break
                self.prologue += 1
        self.block(body, 0)
        newline = next((line[len(line.rstrip("\r\n")) :] for line in self.lines[:1]), "") or "\n"
        return Script(tuple(self.lines), tuple(self.units), self.prologue, newline, self.encoding)

    def block(self, body: Sequence[ast.stmt], depth: int) -> None:
        strings = [statement for statement in body if _is_text(statement)]
        for statement in body:
            if statement in strings and len(strings) < len(body) and self.units:
                self.extend(statement)  # a string on its own is a comment, as long as the block has a statement
            else:
                self.statement(statement, depth)

    def extend(self, statement: ast.stmt) -> None:
        last = self.units[-1]
        end = max(last.end, statement.end_lineno or 0)
        self.units[-1] = Unit(last.depth, last.text, last.first, end, last.node, last.opens, last.shared)

    def add(self, text: str, depth: int, first: int, last: int, node: ast.AST, opens: bool = False) -> None:
        """Append a unit; lines count from 1, the last one included."""
        before = self.units[-1].end if self.units else self.prologue
        continued = bool(self.units) and self.lines[before - 1].rstrip("\r\n").endswith("\\")
        self.units.append(Unit(depth, text, first - 1, max(last, before), node, opens, continued or first - 1 < before))

    def statement(self, node: ast.stmt, depth: int) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.definition(node, depth)
        elif isinstance(node, ast.If):
            self.branch(node, depth, "if")
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self.header(node, depth, node.body)
            self.block(node.body, depth + 1)
            self.keyword("else", node.body, node.orelse, depth)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self.header(node, depth, node.body)
            self.block(node.body, depth + 1)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.guarded(node, depth)
        elif isinstance(node, ast.Match):
            self.match(node, depth)
        else:
            self.add(ast.unparse(node), depth, node.lineno, node.end_lineno or node.lineno, node)

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, depth: int) -> None:
        for decorator in node.decorator_list:
            self.add(f"@{ast.unparse(decorator)}", depth, decorator.lineno, decorator.end_lineno or 0, decorator)
        body = node.body
        documented = _is_text(body[0])
        self.header(node, depth, body, opens=not documented)
        if documented:
            self.extend(body[0])
            body = body[1:]
        self.block(body, depth + 1)

    def branch(self, node: ast.If, depth: int, word: str) -> None:
        self.header(node, depth, node.body, word)
        self.block(node.body, depth + 1)
        match node.orelse:
            case [ast.If() as inner] if self.rest((inner.lineno, inner.col_offset)).startswith("elif"):
                self.branch(inner, depth, "elif")
            case orelse:
                self.keyword("else", node.body, orelse, depth)

    def guarded(self, node: ast.Try | ast.TryStar, depth: int) -> None:
        last = self.find(":", (node.lineno, node.col_offset), _start(node.body[0]))
        self.add("try:", depth, node.lineno, last, ast.Pass(), opens=True)
        self.block(node.body, depth + 1)
        for handler in node.handlers:
            word = "except*" if isinstance(node, ast.TryStar) else "except"
            bare = ast.ExceptHandler(type=handler.type, name=handler.name, body=[ast.Pass()])
            text = " ".join([word, *([ast.unparse(handler.type)] if handler.type else [])])
            text += f" as {handler.name}:" if handler.name else ":"
            after = _end(handler.type) if handler.type else (handler.lineno, handler.col_offset)
            last = self.find(":", after, _start(handler.body[0]))
            self.add(text, depth, handler.lineno, last, bare, opens=True)
            self.block(handler.body, depth + 1)
        above = node.handlers[-1].body if node.handlers else node.body
        self.keyword("else", above, node.orelse, depth)
        self.keyword("finally", node.orelse or above, node.finalbody, depth)

    def match(self, node: ast.Match, depth: int) -> None:
        first = node.cases[0].pattern
        last = self.find(":", _end(node.subject), (first.lineno, first.col_offset))
        self.add(f"match {ast.unparse(node.subject)}:", depth, node.lineno, last, node.subject, opens=True)
        after: Position = (last, 0)
        for case in node.cases:
            pattern = case.pattern
            begin = self.find("case", after, (pattern.lineno, pattern.col_offset))
            guard = f" if {ast.unparse(case.guard)}" if case.guard else ""
            last = self.find(":", _end(case.guard or pattern), _start(case.body[0]))
            bare = ast.match_case(pattern=pattern, guard=case.guard, body=[ast.Pass()])
            self.add(f"case {ast.unparse(pattern)}{guard}:", depth + 1, begin, last, bare, opens=True)
            self.block(case.body, depth + 2)
            after = _end(case.body[-1])

    def header(
        self, node: ast.stmt, depth: int, body: Sequence[ast.stmt], word: str = "", *, opens: bool = True
    ) -> None:
        """The header of a compound statement: the same node with an empty body, so that it says nothing of its own."""
        bare = copy.copy(node)
        for name, empty in (("body", [ast.Pass()]), ("orelse", []), ("decorator_list", [])):
            if hasattr(bare, name):
                setattr(bare, name, empty)
        text = ast.unparse(bare).rpartition("\n")[0]
        if word == "elif":
            text = f"el{text}"
        after = max([(node.lineno, node.col_offset), *(_end(part) for part in _parts(bare))])
        last = self.find(":", after, _start(body[0]))
        self.add(text, depth, node.lineno, last, bare, opens)

    def keyword(self, word: str, above: Sequence[ast.stmt], body: Sequence[ast.stmt], depth: int) -> None:
        """The line of an `else` or a `finally`, of which the syntax tree knows nothing."""
        if not body:
            return
        first = self.find(word, _end(above[-1]), _start(body[0]))
        last = self.find(":", _end(above[-1]), _start(body[0]))
        self.add(f"{word}:", depth, first, last, ast.Pass(), opens=True)
        self.block(body, depth + 1)

    def rest(self, position: Position) -> str:
        """What stands from a position to the end of its line."""
        line, column = position
        return self.lines[line - 1].encode()[column:].decode(errors="replace")

    def find(self, word: str, after: Position, before: Position) -> int:
        """The line of a keyword or colon between two positions, where else there are only brackets and comments."""
        wanted = re.compile(rf"\b{word}\b" if word.isalpha() else re.escape(word))
        for number in range(max(1, after[0]), before[0] + 1):
            line = self.lines[number - 1].encode()
            low = after[1] if number == after[0] else 0
            high = before[1] if number == before[0] else len(line)
            if wanted.search(line[low:high].decode(errors="replace").partition("#")[0]):
                return number
        return before[0]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _start(node: ast.stmt) -> Position:
    decorators = getattr(node, "decorator_list", None)
    if decorators:
        return decorators[0].lineno, max(0, decorators[0].col_offset - 1)
    return node.lineno, node.col_offset


def _end(node: ast.AST) -> Position:
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0


def _parts(header: ast.stmt) -> Iterator[ast.AST]:
    """What a header consists of, one level deep: nested positions are not reliable inside f-strings."""
    for child in ast.iter_child_nodes(header):
        if isinstance(child, ast.arguments | ast.withitem):
            yield from ast.iter_child_nodes(child)
        elif not isinstance(child, ast.stmt):
            yield child
