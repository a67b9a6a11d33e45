"""Make any text fit to be shown: invisible characters become visible escapes, and length is bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")

# Controls, bidirectional overrides, zero-width and blank-looking letters, unpaired surrogates, noncharacters: what
# could hide text, reorder it, or make a file ill-formed. Tab and newline stay. U+FE0E and U+FE0F (emoji style) stay.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff\ufdd0-\ufdef\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def _escape(match: re.Match[str]) -> str:
    point = ord(match.group())
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def visible(text: str) -> str:
    """`text` with every control and invisible character as an escape such as `\\u202e`; applying it twice is harmless.

    Colour codes of terminals are taken out, `\\r\\n` and a lone `\\r` (a progress bar) become a newline.
    """
    if text.isprintable() and text.isascii():
        return text
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _INVISIBLE.sub(_escape, text)


def one_line(text: str, limit: int = 300) -> str:
    """`text` in one visible line of at most `limit` characters; a longer one ends in an ellipsis."""
    if len(text) <= limit and text.isprintable() and text.isascii():  # nearly all texts
        return text
    if len(text) > 8 * limit:  # enough of it, so that a message of megabytes costs nothing
        text = text[: 8 * limit] + "…"
    text = visible(" ".join(visible(text).split()))
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def clipped(text: str, limit: int) -> str:
    """`text` in visible form, its middle left out (and said so) when it is longer than `limit` characters.

    The last three quarters of the room go to the end, where tracebacks and logs say most.
    """
    if len(text) <= limit:
        return visible(text)
    head, tail = limit // 4, limit - limit // 4
    left_out = len(text) - head - tail
    return f"{visible(text[:head])}\n… {left_out:,} characters left out …\n{visible(text[-tail:])}"


def listing(words: Iterable[str]) -> str:
    """Words as a person lists them: `a`, `a and b`, `a, b and c`."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 cell`, `1,200 cells`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
