"""Run the benchmarks one after the other, and keep what they print with the machine and the date.

    python benchmarks [--reframe /path/to/reframe] [--only overhead]

writes `benchmarks/README.md`. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from matrix.environments import host

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
HEAD = """# Benchmarks

Figures of one machine on one day, written by `python benchmarks`. What each one measures, and how, stands at the top of
its file.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reframe", help="ReFrame's command, for overhead.py")
    parser.add_argument(
        "--only", choices=["overhead", "report", "workloads"], help="leave the others' figures as they are"
    )
    args = parser.parse_args()
    sections = kept(README.read_text()) if README.exists() else {}
    for name in ("overhead", "report", "workloads"):
        if args.only in (None, name):
            more = ["--reframe", args.reframe] if name == "overhead" and args.reframe else []
            sections[name] = section(name, more)
            ordered = [sections[each] for each in ("overhead", "report", "workloads") if each in sections]
            README.write_text("\n".join([HEAD, *ordered]))


def kept(text: str) -> dict[str, str]:
    """The sections of the file as it is, by name."""
    return {
        match[2]: match[1] for match in re.finditer(r"(^## `(\w+)\.py`.*?)(?=\n## |\Z)", text, re.DOTALL | re.MULTILINE)
    }


def section(name: str, more: list[str]) -> str:
    """What a benchmark says of itself, where and when it ran, and what it printed."""
    script = HERE / f"{name}.py"
    about = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    done = subprocess.run([sys.executable, str(script), *more], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    machine = host()
    frameworks = ", ".join(f"{each} {version(each)}" for each in ("torch", "jax"))
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; {machine['os']}"
    today = datetime.datetime.now(datetime.UTC).date()
    printed = "\n".join(f"    {line}" for line in done.stdout.splitlines())
    return (
        f"## `{name}.py`\n\n{about}\n\n{today}; {where}; Python {sys.version.split()[0]}, {frameworks}.\n\n{printed}\n"
    )


if __name__ == "__main__":
    main()
