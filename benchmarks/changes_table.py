"""Write the table "from one device to N: lines, hunks, communication lines" into a file, or show it.

python benchmarks/changes_table.py              print it
python benchmarks/changes_table.py README.md    renew it between its marks (see matrix/changelist.py)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix import changelist


def main(files: list[str]) -> int:
    if not files:
        print(changelist.table())
    for file in map(Path, files):
        text = file.read_text()
        if changelist.BEGIN not in text:
            print(f"{file}: has no line {changelist.BEGIN}", file=sys.stderr)
            return 2
        file.write_text(changelist.with_table(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
