"""How an attempt ended that did not end well: which process failed first, of what, and at which line of the user's."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping
from typing import Any

from matrix.failures import recognise, signature
from matrix.failures.recognise import Recognised
from matrix.journal import Failure
from matrix.launch.process import Event, Observation, rank_codes

EXCERPT = 5  # lines of the user's code around the frame, before and after
MAX_MESSAGE = 2_000
MAX_TEXT = 20_000  # characters of a log or a native stack
LOG_END = 65_536  # bytes of a log in which the last words of a process are looked for

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGXCPU)


def death(seen: Observation, root: str) -> Failure | None:
    """The failure of an attempt that did not end by itself with exit code 0; None of one that did.

    Of many ranks the first to fail counts. One that the system killed, or that left with `os._exit`, could not tell
    when; but of the others those that only lost the connection to it came later.

    Args:
        seen: what was observed.
        root: the workload's folder.
    """
    told = sorted(
        (
            (event["time"], rank, event)
            for rank in seen.events
            for event in seen.events[rank]
            if event["event"] == "exception" or (event["event"] == "exit" and event["code"] % 256 and seen.code != 0)
        ),
        key=lambda each: each[:2],
    )
    found = [(rank, event, recognise.recognise(event["chain"], root)) for _, rank, event in told]
    codes = rank_codes(seen)
    if not codes and seen.code and seen.ended_by is None and len(seen.events) == 1:
        codes = {next(iter(seen.events)): seen.code}
    speaking = {rank for rank, _, _ in found}
    silent = {rank: code for rank, code in codes.items() if rank not in speaking and code}
    if seen.ended_by is not None:  # what our own signal ended, did not die by itself
        silent = {rank: code for rank, code in silent.items() if -code not in (signal.SIGTERM, signal.SIGINT)}
    first = next((each for each in found if not each[2].lost_peer), None)
    if first is None and silent:
        rank, code = next(iter(silent.items()))
        followers = {str(other): each.message[:MAX_MESSAGE] for other, _, each in found}
        return _without_a_word(seen, root, rank, code, followers)
    if found:
        return _told(seen, root, first or found[0], found)
    if seen.ended_by in ("timeout", "hang"):
        return _stuck(seen, root)
    if seen.code and not seen.events:
        return _never_started(seen)
    if seen.code and seen.code < 0:
        return simple("rank-died", f"the launcher was killed ({_name(-seen.code)})")
    if seen.code:
        return simple("exit", f"exit code {seen.code}, although no process of it said why")
    return None


def simple(cause: str, message: str, rank: int | None = None, **more: Any) -> Failure:
    """A failure that needs no more than a sentence."""
    message = readable(message)[:MAX_MESSAGE]
    signed = signature(cause, message, more.get("frame"))
    return Failure(cause=cause, message=message, rank=rank, signature=signed, **more)


def readable(text: str) -> str:
    """A text that every writer takes: lone surrogates are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _placed(root: str, frame: tuple[str, int] | None) -> dict[str, Any]:
    """The fields of a failure that say where."""
    if frame is None:
        return {}
    lines = [(number, readable(text)) for number, text in recognise.excerpt(root, frame, EXCERPT)]
    return {"frame": f"{frame[0]}:{frame[1]}", "excerpt": lines}


Found = tuple[int, Event, Recognised]


def _told(seen: Observation, root: str, first: Found, found: list[Found]) -> Failure:
    rank, event, said = first
    followers = {str(other): readable(each.message)[:MAX_MESSAGE] for other, _, each in found if other != rank}
    place: dict[str, Any] = {**_placed(root, said.frame), "followers": followers}
    place["traceback"] = readable(event["traceback"])
    if event["event"] == "exit":
        return simple("exit", _exit_message(seen, rank, event), rank, **place)
    left = [other for other in seen.events if other != rank and seen.of("end", other)]
    if said.lost_peer and left and not any(each[0] in left for each in found):
        message = f"rank {left[0]} had come to its end while rank {rank} still waited for it: {said.message}"
        return simple("collective-mismatch", message, rank, **place)
    cause, message = said.cause, said.message
    if said.lost_peer and len(seen.events) > 1 and cause == "exception":
        cause = "network"
    if cause == "crash":  # of a process that this one had started, and which could not tell of it itself
        cause, message = _in_its_words(seen, root, rank, cause, message)
    return simple(cause, message, rank, **place)


def _exit_message(seen: Observation, rank: int, event: Event) -> str:
    words = event["chain"][0]["message"].strip()
    if not words or re.fullmatch(r"-?\d+|True|False", words):
        words = _last_line(seen, rank)
    return f"exit code {event['code'] % 256}" + (f": {words}" if words else "")


def _without_a_word(seen: Observation, root: str, rank: int, code: int, followers: Mapping[str, str]) -> Failure:
    """A process that ended by a signal, or left without raising."""
    more: dict[str, Any] = {"followers": {other: readable(said) for other, said in followers.items()}}
    if code > 0:
        words = _last_line(seen, rank)
        return simple("exit", f"exit code {code}, without an exception" + (f": {words}" if words else ""), rank, **more)
    who = f"rank {rank}" if len(seen.events) > 1 else "the process"
    if -code in FROM_OUTSIDE:
        return simple("rank-died", f"{who} was killed ({_name(-code)})", rank, **more)
    native = _native_stack(seen, rank)
    frame = native_frame(native or "", root)
    if native:
        more["traceback"] = readable(native)
    cause, message = _in_its_words(seen, root, rank, "crash", f"{who} was ended by {_name(-code)}")
    return simple(cause, message, rank, **_placed(root, frame), **more)


def _in_its_words(seen: Observation, root: str, rank: int, cause: str, message: str) -> tuple[str, str]:
    """Cause and message of a crash, in the light of what native code wrote before it gave up."""
    words = _last_words(seen, rank)
    if not words:
        return cause, message
    known = recognise.recognise([{"type": "launcher", "message": words}], root).cause
    return known if known != "exception" else cause, f"{message}: {words}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_of_log(seen: Observation, rank: int | str) -> list[str]:
    log = seen.logs.get(str(rank))
    if log is None or not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _last_line(seen: Observation, rank: int) -> str:
    """The last line of a rank's log, if it is not one of progress."""
    lines = _end_of_log(seen, rank)
    return "" if not lines or seen.is_progress(lines[-1].encode()) else lines[-1][:MAX_MESSAGE]


_LAST_WORDS = re.compile(
    r"^(?:what\(\): +(.+)|F\d{4} [\d:.]+ +\d+ [^\]]+\] *(.+)|[\d-]+ [\d:.]+: F [^\]]+\] *(.+)|"
    r"((?:free|malloc|corrupted|double free).*\(.*\).*)|"
    r"(\*\*\* stack smashing.*)|(Assertion .* failed.*)|(terminate called .*)|(Fatal Python error: (?!Aborted|Segm).*))"
)


def _last_words(seen: Observation, rank: int) -> str:
    """What native code wrote before it gave up."""
    for line in reversed(_end_of_log(seen, rank)):
        if match := _LAST_WORDS.match(line):
            return next(group for group in match.groups() if group)[:MAX_MESSAGE]
    return ""


def _native_stack(seen: Observation, rank: int) -> str | None:
    log = seen.logs.get(str(rank))
    if log is None:
        return None
    file = log.with_suffix(".crash")
    return file.read_text("utf-8", "replace")[-MAX_TEXT:] if file.exists() else None


def native_frame(text: str, root: str) -> tuple[str, int] | None:
    """The innermost line of the user's in a stack that Python's faulthandler wrote, innermost first."""
    _, _, current = text.rpartition("Current thread")
    for file, line in re.findall(r'^ +File "([^"\n]+)", line (\d+)', current or text, re.MULTILINE):
        if place := recognise.users(file, root):
            return place, int(line)
    return None


def stack_frame(stack: str, root: str) -> tuple[str, int] | None:
    """The innermost line of the user's in the main thread of a stack that py-spy wrote, innermost first."""
    process = re.match(r"Process (\d+)", stack)
    names = ['[^\\n]*"MainThread"', *([rf"{process.group(1)} "] if process else ())]
    found = (re.search(rf"^Thread {name}[^\n]*\n((?: +[^\n]*\n?)*)", stack, re.MULTILINE) for name in names)
    main = next((match.group(1) for match in found if match), stack)
    for file, line in re.findall(r"\((/[^()\n]+):(\d+)\)", main):
        if place := recognise.users(file, root):
            return place, int(line)
    return None


def _stuck(seen: Observation, root: str) -> Failure:
    lines = seen.of("progress", seen.reporter)
    last = f"the last line was step {lines[-1]['step']:g}" if lines else "there was no progress line at all"
    stacks = {rank: readable(text.replace(f"({root}/", "(")) for rank, text in seen.stacks.items()}
    if seen.ended_by == "timeout":
        return simple("timeout", f"did not end within its time limit; {last}", stacks=stacks)
    if seen.events and all(seen.of("end", rank) for rank in seen.events):
        last = "the script had come to its end, but its process did not"
    places = {rank: stack_frame(text, root) for rank, text in seen.stacks.items()}
    odd = _odd_one(places, {rank for rank, text in seen.stacks.items() if "/torch/distributed/" in text})
    message = f"nothing was reported for longer than 'no_progress' allows; {last}"
    threads = {rank: text for rank in seen.events if (text := _thread_error(seen, rank))}
    if threads:
        message += f"; a thread of rank {min(threads)} had failed"
    more = {"traceback": readable(threads[min(threads)])} if threads else {}
    where = _placed(root, places[odd]) if odd is not None else {}
    return simple("hang", message, int(odd) if odd is not None else None, stacks=stacks, **where, **more)


def _odd_one(places: Mapping[str, tuple[str, int] | None], waiting: Collection[str]) -> str | None:
    """The rank that the others wait for: in no collective itself, and where the fewest stand; the lowest."""
    standing = list(places.values())
    return min(places, key=lambda rank: (rank in waiting, standing.count(places[rank]), int(rank)), default=None)


def _thread_error(seen: Observation, rank: int) -> str:
    """The traceback that a thread left in the log: it ends the thread, not the script that waits for it."""
    log = seen.logs.get(str(rank))
    if log is None:
        return ""
    text = log.read_text("utf-8", "replace")
    begin = text.find("Exception in thread")
    return text[begin : begin + MAX_TEXT] if begin >= 0 else ""


def _never_started(seen: Observation) -> Failure:
    """The command ended before any process of it ran the script: the launcher, or the interpreter, failed."""
    log = seen.logs.get("launcher") or seen.logs.get("0")
    text = log.read_text("utf-8", "replace") if log else ""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    said = lines[-1].strip() if lines else ""
    assert seen.code is not None
    how = f"exit code {seen.code}" if seen.code > 0 else _name(-seen.code)
    message = f"the launcher ended before the script began ({how})" + (f": {said}" if said else "")
    more: dict[str, Any] = {"traceback": readable(text[-MAX_TEXT:]) or None}
    if seen.code < 0:
        return simple("rank-died" if -seen.code in FROM_OUTSIDE else "crash", message, **more)
    chain = [{"type": "launcher", "message": text[-MAX_TEXT:]}] if text else []
    cause = recognise.recognise(chain, "/nowhere").cause if chain else "exit"
    return simple("exit" if cause == "exception" else cause, message, **more)
