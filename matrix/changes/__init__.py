"""What a port changes against its baseline, what each change is for, and which of them its cell needs."""

from matrix.changes.comparison import (
    Comparison,
    Hunk,
    compare,
    compare_files,
    compare_scripts,
    count,
    differences,
    patch,
    without,
)

__all__ = [
    "Comparison",
    "Hunk",
    "compare",
    "compare_files",
    "compare_scripts",
    "count",
    "differences",
    "patch",
    "without",
]
