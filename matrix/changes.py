"""How a port differs from its baseline, in lines, after formatting and comments are normalised."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from matrix.journal import Changes


def normalised(text: str) -> list[str]:
    """The lines of a Python source as `ast` writes it: no comments, one formatting; raw lines if it does not parse."""
    try:
        return ast.unparse(ast.parse(text)).splitlines()
    except (SyntaxError, ValueError, RecursionError):
        return [line.rstrip() for line in text.splitlines() if line.strip()]


def count(baseline: Path, port: Path) -> Changes:
    """Added and deleted lines, and hunks, from the baseline to the port (both normalised)."""
    before, after = (normalised(path.read_text("utf-8", "replace")) for path in (baseline, port))
    added = deleted = hunks = 0
    for tag, a1, a2, b1, b2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            hunks += 1
            deleted += a2 - a1
            added += b2 - b1
    return Changes(added=added, deleted=deleted, hunks=hunks)
