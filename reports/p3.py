"""Portability data for Intel's p3 analysis library (https://github.com/P3HPC/p3-analysis-library), to check ours.

`efficiency.csv` has the columns that its metrics read (problem, application, platform, fom; a throughput, so
`foms="higher"`) and a coverage_key into `coverage.csv`, whose column `coverage` is JSON by the library's
`coverage.schema`; every such JSON is also a file of its own, with the code that its line numbers count.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reports.exports import safe
from reports.portability import Point, Portability


def coverage(application: Portability, point: Point) -> list[dict[str, Any]]:
    """The lines of an application's code that are used on a platform, and those that are not."""
    used = application.lines(point)
    return [
        {
            "file": file_name(application),
            "id": application.weave.id,
            "used_lines": sorted(used),
            "unused_lines": [number for number in range(1, len(application.weave.lines) + 1) if number not in used],
        }
    ]


def file_name(application: Portability) -> str:
    """The name of the file that holds all sources of an application laid over each other."""
    plain = f"{application.problem}-{application.application}"
    name = re.sub(r"[^\w.=-]+", "-", plain)
    if name != plain.replace("/", "-") or len(name) > 100:  # others may become the same
        name = f"{name[:80]}-{hashlib.sha256(plain.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return f"{name}.py"


def key(application: Portability, point: Point) -> str:
    """What names a coverage: the code, and which of its sources is used."""
    return _name(f"{application.coverage_key[:16]}:{point.source}")


def _name(text: str) -> str:
    """As every other export has it: visible, and no formula."""
    return str(safe(text))


def write(found: Iterable[Portability], folder: Path) -> None:
    """Write both tables, the coverage files and the code into a folder.

    A platform on which an application is unproven or was not measured has no row: the library has no word for that,
    and would take it for one that fails.
    """
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str, float, str]] = []
    coverages: dict[str, str] = {}
    for application in found:
        for point in application.points:
            if point.fom is None:
                continue
            name = key(application, point)
            rows.append((_name(point.problem), _name(point.application), _name(point.platform), point.fom, name))
            coverages[name] = json.dumps(coverage(application, point))
        (code / file_name(application)).write_text(application.weave.text, "utf-8", "backslashreplace")
        by_platform = {p.platform: coverage(application, p) for p in application.points if p.source}
        (code / f"{file_name(application)}.coverage.json").write_text(json.dumps(by_platform, indent=1) + "\n")
    _write(folder / "efficiency.csv", ("problem", "application", "platform", "fom", "coverage_key"), rows)
    _write(folder / "coverage.csv", ("coverage_key", "coverage"), coverages.items())


def _write(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
