"""What the shipped workloads' ports change, JAX beside PyTorch, as the table that stands in the README.

python -m matrix.changes.table              show it
python -m matrix.changes.table README.md    renew it in the README, between its marks
"""

from __future__ import annotations

import sys
from pathlib import Path

from matrix import changes, workload
from matrix.changes import categories
from matrix.workload import Source, Workload

BEGIN = "<!-- made by `python -m matrix.changes.table README.md`: begin -->"
END = "<!-- made by `python -m matrix.changes.table README.md`: end -->"
FRAMEWORKS = (("torch", "PyTorch"), ("jax", "JAX"))


def table() -> str:
    """What the shipped workloads' ports change, JAX beside PyTorch, as Markdown."""
    head = ["workload", "from one device to"]
    for _, title in FRAMEWORKS:
        head += [title, "lines", "hunks", "communication"]
    rows = [head, ["---"] * 2 + ["---", "---:", "---:", "---:"] * len(FRAMEWORKS)]
    for folder in sorted(workload.SHIPPED.iterdir()):
        if (folder / workload.FILE).is_file():
            rows += _rows(workload.load(folder))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(job: Workload) -> list[list[str]]:
    rows = []
    steps: dict[str, dict[str, list[list[str]]]] = {}
    for framework, _ in FRAMEWORKS:
        implementation = job.implementations.get(framework)
        if implementation is None:
            continue
        baseline = implementation.baseline
        if baseline.written_for == "any":
            steps.setdefault("another chip", {})[framework] = [[f"`{baseline.name}`", "0", "0", "0"]]
        for port in implementation.ports:
            steps.setdefault(_step(port), {}).setdefault(framework, []).append(_cells(baseline, port))
    for step, by_framework in steps.items():
        for index in range(max(map(len, by_framework.values()))):
            row = [job.name, step]
            for framework, _ in FRAMEWORKS:
                cells = by_framework.get(framework, [])
                row += cells[index] if index < len(cells) else [""] * 4
            rows.append(row)
    return rows


def _step(port: Source) -> str:
    """What a port is for: `N devices (data)`, `M hosts (data)`, `another chip`; with a backend of its own."""
    strategies = ", ".join(port.serves.get("strategy", ()))
    nodes, backends = port.serves.get("nodes", ()), port.serves.get("backend", ())
    chips = [*backends[:1]] * (not set(backends) & set(dict(FRAMEWORKS))) + [*port.serves.get("accelerator", ())]
    words = [each for each in ("" if strategies == "single" else strategies, *chips) if each]
    hosts = "M hosts" if nodes and "1" not in nodes else "N devices"
    where = "another chip" if strategies == "single" else hosts
    return f"{where} ({', '.join(words)})" if words else where


def _cells(baseline: Source, port: Source) -> list[str]:
    comparison = changes.compare_files(baseline.file, port.file)
    communication = categories.communication(categories.sort(comparison))
    lines = f"+{comparison.added} -{comparison.deleted}"
    return [f"`{port.name}`", lines, str(len(comparison.hunks)), str(communication)]


def with_table(text: str) -> str:
    """A text with the table between its two marks renewed; the same text where it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}" if begin and end else text


def main(files: list[str]) -> int:
    if not files:
        print(table())
    for file in map(Path, files):
        text = file.read_text("utf-8")
        if BEGIN not in text or END not in text:
            print(f"{file}: has no lines {BEGIN} and {END}", file=sys.stderr)
            return 2
        file.write_text(with_table(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
