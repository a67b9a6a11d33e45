"""From an exception, told as data, to the cause that it shows, the message that counts, and the line of the user's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from matrix.failures.wordings import ASSERTED, BY_FRAMEWORK, BY_SCRIPT, BY_TYPE, FRAMEWORKS, LOST_PEER, WRAPPERS

NETWORK = {"socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "httpcore", "aiohttp", "asyncio"}
MAX_READ = 8_000  # characters of a message that are searched, from each end


class Recognised(NamedTuple):
    """What an exception amounts to.

    Attributes:
        cause: id of the cause; `exception` when it is of no known kind.
        message: `Type: message` of the link in the chain that shows the cause.
        frame: file (relative to the workload's folder) and line of the innermost line of the user's; None if none.
        lost_peer: whether it says no more than that another process is gone.
    """

    cause: str
    message: str
    frame: tuple[str, int] | None
    lost_peer: bool


@dataclass(frozen=True)
class _Link:
    """One exception of a chain, or a traceback that a message quotes."""

    type: str
    names: tuple[str, ...]
    message: str
    frames: tuple[Mapping[str, Any], ...] = ()
    raised: bool = False
    code: str = ""

    @property
    def text(self) -> str:
        return _ends(self.message)

    @property
    def framework(self) -> bool:
        """Whether a framework, or C code, speaks."""
        if any(name.split(".")[0] in FRAMEWORKS for name in self.names) or self.type == "launcher":
            return True
        if not self.frames:
            return False
        return _package(self.frames[-1]) in FRAMEWORKS or not self.raised


def _ends(text: str) -> str:
    return text if len(text) <= 2 * MAX_READ else f"{text[:MAX_READ]}\n{text[-MAX_READ:]}"


def _package(frame: Mapping[str, Any]) -> str:
    """The top-level module that a frame belongs to."""
    if frame.get("module"):
        return str(frame["module"]).split(".")[0]
    parts = PurePath(frame["file"]).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return ""


def recognise(chain: Sequence[Mapping[str, Any]], root: str) -> Recognised:
    """What an exception shows.

    Args:
        chain: the exception and what it came from, outermost first, as `inside/worker.py` tells it.
        root: the workload's folder, below which the user's code lies.
    """
    links = list(_links(chain))
    cause, link = _cause(links)
    frame = None
    for each in (*_traced(links, link), link, *links):
        frame = _user_frame(each, root)
        if frame is not None:
            break
    message = _clean(link.message)
    return Recognised(cause, f"{link.type}: {message}" if message else link.type, frame, _lost_peer(links))


def _cause(links: Sequence[_Link]) -> tuple[str, _Link]:
    for link in links:
        if _importing(link):
            return "broken-install", link
        if _connecting(link):
            return "network", link
        for table in (BY_TYPE, BY_FRAMEWORK if link.framework else BY_SCRIPT):
            for rule in table:
                if rule.fits(link.names, link.text):
                    return rule.cause, link
        if link.raised and not link.message and ASSERTED.search(link.code):
            return "missing-device", link
    for link in links:
        for rule in WRAPPERS:
            if rule.fits(link.names, link.text):
                return rule.cause, link
    for link in links:
        if "TypeError" in link.names:
            return "type", link
    told = [link for link in links if not any(name.endswith("ExceptionGroup") for name in link.names)]
    return "exception", (told or links)[0]


def _importing(link: _Link) -> bool:
    """Whether a framework itself was being imported when this was raised."""
    names = [frame.get("module") for frame in link.frames if frame["function"] == "<module>"]
    names += [_package(f) for f in link.frames if f["function"] == "<module>" and f["file"].endswith("__init__.py")
              and PurePath(f["file"]).parent.name == _package(f)]  # fmt: skip
    return any(name in FRAMEWORKS for name in names)


def _connecting(link: _Link) -> bool:
    """Whether a connection over a network failed, not one between processes of the script, nor a future's deadline."""
    packages = {_package(frame) for frame in link.frames}
    if "TimeoutError" in link.names:
        return bool(packages & NETWORK)
    lost = {"ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"} & set(link.names)
    return bool(lost) and not link.raised and "multiprocessing" not in packages


def _links(chain: Sequence[Mapping[str, Any]]) -> Iterator[_Link]:
    """The links that tell something: an exception that came up by accident in a handler hides what was handled."""
    follow = True
    for told in chain:
        if told.get("relation") == "context" and not follow:
            return
        link = _Link(
            type=told["type"],
            names=tuple(dict.fromkeys((told["type"], *told.get("bases", ())))),
            message=told["message"],
            frames=tuple(told.get("frames", ())),
            raised=bool(told.get("raised")),
            code=told.get("code", ""),
        )
        yield from quoted(link.message)
        yield link
        follow = link.raised or any(name.split(".")[0] in FRAMEWORKS for name in link.names)


_FRAME = re.compile(
    r'^[ |+]*File "([^"\n]+)", line (\d+)(?:, in (\S+))?\n?(?:[ |]+(?!File |[ |])([^\n]*))?', re.MULTILINE
)
_HEADLINE = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*)(?:: (.*))?$", re.MULTILINE | re.DOTALL)
_BEGIN = "Traceback (most recent call last):"


def quoted(text: str) -> Iterator[_Link]:
    """The exception of the last traceback that a text quotes: of another process, a callback, a log."""
    _, found, text = re.sub(r"(?m)^\[rank\d+\]: ?", "", _ends(text)).rpartition(_BEGIN)
    frames = list(_FRAME.finditer(text)) if found else []
    if not frames:
        return
    lines = text[frames[-1].end() :].split("\n")
    while lines and (not lines[0] or lines[0][0] in " \t|"):  # carets below the last line
        lines.pop(0)
    headline = _HEADLINE.match("\n".join(lines).strip())
    if headline is None:
        return
    kind = headline.group(1)
    told = tuple({"file": f[1], "line": int(f[2]), "function": f[3] or "", "module": None} for f in frames)
    code = frames[-1].group(4) or ""
    yield _Link(kind, (kind,), (headline.group(2) or "").strip(), told, code.startswith(("raise ", "assert ")), code)


def _traced(links: Sequence[_Link], link: _Link) -> list[_Link]:
    """Where a value was traced that made this error later, or the stack in another process: a cause of its own."""
    after = links[links.index(link) + 1 :][:2]
    return [each for each in after if each.type.endswith(("JaxStackTraceBeforeTransformation", "RemoteTraceback"))]


def _user_frame(link: _Link, root: str) -> tuple[str, int] | None:
    """The innermost frame below the workload's folder: of a stack that the message quotes, else of its own."""
    for file, line in reversed([(f[1], int(f[2])) for f in _FRAME.finditer(link.text)]):
        if place := users(file, root):
            return place, line
    for frame in reversed(link.frames):
        if frame["line"] and (place := users(frame["file"], root)):
            return place, frame["line"]
    return None


def users(file: str, root: str) -> str | None:
    """The path of a file relative to the workload's folder; None for other files and for installed packages."""
    for folder in (root, os.path.realpath(root)):
        path = PurePath(file)
        if path.is_absolute() and path.is_relative_to(folder):
            inside = path.relative_to(folder)
            return None if {"site-packages", "dist-packages"} & set(inside.parts) else inside.as_posix()
    return None


_AFTER = re.compile(
    r"\n+(?:from user code:|Original Traceback|Set TORCHDYNAMO_VERBOSE|Set TORCH_LOGS|Exception raised from |"
    r"The stack trace below excludes|-{10,}\s*\nFor simplicity, JAX|C\+\+ CapturedTraceback)"
)


def _clean(message: str) -> str:
    """A message without the stacks and hints that frameworks append."""
    return (_AFTER.split(message[: 2 * MAX_READ], maxsplit=1)[0]).strip()


def _lost_peer(links: Sequence[_Link]) -> bool:
    return any(link.framework and LOST_PEER.search(link.text) for link in links)


def excerpt(root: str, frame: tuple[str, int], around: int) -> list[tuple[int, str]]:
    """Numbered lines of the user's code around a frame."""
    try:
        text = Path(root, frame[0]).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    first = max(1, frame[1] - around)
    return [(number, text[number - 1][:500]) for number in range(first, min(len(text), frame[1] + around) + 1)]
