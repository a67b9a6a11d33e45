"""Reads a YAML file of unknown origin into plain data that remembers where each value stands.

YAML is read by the 1.2 core schema, which has fewer surprises than PyYAML's 1.1: `1e-5` is a number, `on`, `no` and
`2027-06-30` are text, and only `true` and `false` are booleans. Keys are always text.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from matrix.errors import UsageError

MAX_BYTES = 1 << 20
MAX_NODES = 20_000  # aliases count as what they stand for, so that a few lines cannot grow into gigabytes
MAX_DEPTH = 50
MAX_DIGITS = 18  # more digits than any setting has; far below the length at which Python refuses to convert

UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}

Location = tuple[int | str, ...]


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file of at most `MAX_BYTES`, without a byte order mark. Never blocks.

    Raises:
        UsageError: it is no such file; the message names what it is instead.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # asked first: merely opening a device can have effects
            what = "a folder" if os.path.isdir(path) else "no regular file"
            raise UsageError(f"this is {what}, expected a text file", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError("this is no regular file, expected a text file", path)
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError("there is no such file", path) from None
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror or error}", path) from None
    except ValueError as error:  # a null byte in the name
        raise UsageError(f"the file cannot be read: {error}", repr(str(path))) from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"the file is larger than {MAX_BYTES >> 20} MiB", path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        raise UsageError(f"this is no UTF-8 text: byte 0x{raw[error.start]:02x}", path, *_place(before)) from None
    bad = UNPRINTABLE.search(text)
    if bad:
        message = f"the control character U+{ord(bad[0]):04X} is not allowed"
        raise UsageError(message, path, *_place(text[: bad.start()]))
    return text


def _place(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")


@dataclass
class Node:
    """A value and where it stands: 1-based line and column, of itself and of the keys of a mapping."""

    place: tuple[int, int]
    value: Any = None
    text: str | None = None
    """A scalar as it was written."""
    size: int = 1
    height: int = 1
    children: dict[int | str, Node] = field(default_factory=dict)
    keys: dict[int | str, tuple[int, int]] = field(default_factory=dict)

    def data(self, as_text: tuple[Location, ...] = ()) -> Any:
        """Plain data; below the locations `as_text` ("*" stands for any part), scalars are kept as written."""
        if not self.children:
            written = self.text is not None and self.value is not None and () in as_text
            return self.text if written else self.value
        items = {
            part: child.data(tuple(each[1:] for each in as_text if not each or each[0] in (part, "*")))
            for part, child in self.children.items()
        }
        return items if isinstance(self.value, dict) else list(items.values())


@dataclass(frozen=True)
class Document:
    """A YAML file: where it is, its plain data, and the place of every value."""

    path: Path
    data: dict[str, Any]
    root: Node

    def place(self, location: Location, key: bool = False) -> tuple[int, int]:
        """Line and column of the value at `location`, or of its `key`; of the nearest one above if there is none.

        Parts that are not in the file are passed over: a validator names its own steps among them.
        """
        node, place = self.root, self.root.place
        for part in location:
            if part in node.children:
                place = node.keys.get(part, place) if key else node.children[part].place
                node = node.children[part]
        return place

    def error(self, message: str, location: Location = (), key: bool = False) -> UsageError:
        """The message as an error at the place of `location`, to be raised."""
        return UsageError(message, self.path, *self.place(location, key))


def read(path: Path, as_text: tuple[Location, ...] = ()) -> Document:
    """Read a YAML file whose top is a mapping.

    Args:
        path: the file; it may be anything, see `read_text`.
        as_text: locations under which scalars stay as written (`1.0`, `true`), with "*" for any key or index.

    Raises:
        UsageError: it is not one YAML document of plain data within the limits above, with distinct keys.
    """
    text = read_text(path)
    try:
        root = _Builder(path).build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (None, None)
        about = ", ".join(each for each in (error.context, error.problem) if each)
        raise UsageError(f"this is not valid YAML: {about}", path, *place) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"this is not valid YAML: {error}", path) from None
    if not isinstance(root.value, dict):
        raise UsageError(f"expected keys and values, got {shown(root.data())}", path, *root.place)
    return Document(path, root.data(as_text), root)


def _start(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


class _Builder:
    """Builds nodes from libyaml's events, which come without recursion, however deep the text nests."""

    def __init__(self, path: Path):
        self.path = path
        self.anchors: dict[str, Node] = {}
        self.size = 0

    def build(self, text: str) -> Node:
        events: Iterator[Any] = yaml.parse(text, Loader=yaml.CSafeLoader)
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self.error("the file holds several documents, expected one", event)
                root = self.node(next(events), events, 1)
        if root is None or (root.value is None and not root.text):
            raise UsageError("the file is empty", self.path)
        return root

    def error(self, message: str, event: Any) -> UsageError:
        return UsageError(message, self.path, *_start(event))

    def node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        self.nest(depth, event)
        self.grow(1, event)
        node = Node(_start(event))
        if isinstance(event, yaml.ScalarEvent):
            self.scalar(node, event)
        else:
            if event.tag not in (None, "!"):
                raise self.error(f"the tag {shown(event.tag)} is not supported, expected plain data", event)
            before = self.size
            if isinstance(event, yaml.MappingStartEvent):
                self.mapping(node, events, depth)
            else:
                self.sequence(node, events, depth)
            node.size += self.size - before
            node.height += max((child.height for child in node.children.values()), default=0)
        if event.anchor is not None:  # known only now, so that an alias to something around it is an error
            self.anchors[event.anchor] = node
        return node

    def grow(self, by: int, event: Any) -> None:
        self.size += by
        if self.size > MAX_NODES:
            raise self.error(f"the file holds more than {MAX_NODES:,} values, aliases written out", event)

    def nest(self, depth: int, event: Any) -> None:
        if depth > MAX_DEPTH:
            raise self.error(f"this nests deeper than {MAX_DEPTH} levels", event)

    def alias(self, event: Any, depth: int) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise self.error(f"the alias {shown('*' + event.anchor)} stands for nothing that is complete here", event)
        self.grow(node.size, event)
        self.nest(depth + node.height - 1, event)
        return replace(node, place=_start(event))

    def mapping(self, node: Node, events: Iterator[Any], depth: int) -> None:
        node.value = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                return
            if not isinstance(event, yaml.ScalarEvent) or event.tag not in (None, "!", "tag:yaml.org,2002:str"):
                raise self.error("a key must be plain text", event)
            key = self.node(event, events, depth + 1).text or ""
            if key == "<<" and event.implicit[0]:
                raise self.error("merge keys ('<<') are not supported: write the values out", event)
            if key in node.children:
                first = node.keys[key][0]
                raise self.error(f"the key {shown(key)} is there twice, first in line {first}", event)
            node.keys[key] = _start(event)
            node.children[key] = self.node(next(events), events, depth + 1)

    def sequence(self, node: Node, events: Iterator[Any], depth: int) -> None:
        node.value = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            node.children[len(node.children)] = self.node(event, events, depth + 1)

    def scalar(self, node: Node, event: Any) -> None:
        text: str = event.value
        bad = UNPRINTABLE.search(text)
        if bad:  # written as an escape: "\0"
            raise self.error(f"the control character U+{ord(bad[0]):04X} is not allowed", event)
        node.text = text
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise self.error(f"the tag {shown(event.tag)} is not supported, expected plain data", event)
        if not event.implicit[0] or event.tag is not None:  # quoted, a block, or said to be text
            node.value = text
        elif text in _NULLS:
            node.value = None
        elif text in _BOOLEANS:
            node.value = _BOOLEANS[text]
        elif _INTEGER.fullmatch(text) or _BASED.fullmatch(text):
            if len(text) > MAX_DIGITS + 1:
                raise self.error(f"this number has more than {MAX_DIGITS} digits", event)
            node.value = int(text, 0) if _BASED.fullmatch(text) else int(text)
        elif NUMBER.fullmatch(text):
            node.value = float(text)
        elif _NOT_FINITE.fullmatch(text):
            node.value = float(text.replace(".", ""))
        else:
            node.value = text


def shown(value: Any) -> str:
    """A value as a message shows it: short, on one line, in quotes when it is text."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    text = "".join(each if each.isprintable() else " " for each in text)
    return f"'{text}'" if isinstance(value, str) else text
