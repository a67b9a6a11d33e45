"""What had to change, from made-up journals: rows, bars, a side-by-side view, and exports."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from matrix import changes
from matrix.journal import ProofRecord
from reports.merge import Evidence, merge
from reports.required import Mark, bars, differences, markdown, required, side_by_side, write_csv
from tests.reports.records import MadeUpRun, attempt, failure, planned

BASELINE = '"""Doc."""\nimport torch\n\n# a note\nmodel = Model()\nprint(1)\nend\n'
PORT = (
    '"""Doc."""\nimport torch\nimport torch.distributed as dist\n\nmodel = Model()\n'
    "if dist.get_rank() == 0:\n    print(1)\nend\n"
)


def proof(cell: str, *verdicts: str) -> ProofRecord:
    hunks: list[dict[str, Any]] = [
        {"id": i, "old": (1, 1), "new": (1, 1), "added": 1, "deleted": 0, "verdict": verdict, "why": f"because {i}"}
        for i, verdict in enumerate(verdicts, 1)
    ]
    return ProofRecord.model_validate(
        {
            "run": "r",
            "machine": "buildbox",
            "cell": cell,
            "key": "k",
            "source": "torch/ddp.py",
            "baseline": "torch/train.py",
            "changes": {"added": 3, "deleted": 1, "hunks": 2},
            "hunks": hunks,
            "complete": True,
        }
    )


def evidence(*verdicts: str) -> Evidence:
    made = MadeUpRun(sources={"gpt/torch/train.py": BASELINE, "gpt/torch/ddp.py": PORT})
    cell = planned("gpt", "torch", "cpu", "dp2")
    no = failure("idle-devices", "1 did work", source=BASELINE, line=2)
    made.add(cell, attempt(cell, "fail", failure=no), attempt(cell, role="port"))
    broken = planned("gpt", "torch", "cuda", "dp2")
    hang = failure("hang", "=no progress for 60 s", source=PORT, line=3)
    made.add(broken, attempt(broken, "fail", failure=no), attempt(broken, "fail", role="port", failure=hang))
    single = planned("gpt", "torch", "cpu", "single")
    made.add(single, attempt(single))
    if verdicts:
        made.proofs.append(proof(cell.cell, *verdicts))
    return merge([made.journal()])


def test_a_ported_cell_has_its_cost_and_a_broken_one_the_nearest_port_and_what_failed() -> None:
    ported, broken = required(evidence())
    assert (ported.cell, ported.backend, ported.target, ported.state) == (
        "gpt/torch/cpu/dp2",
        "torch",
        "cpu/dp2",
        "ported",
    )
    # An import, a header, and the line that moved below it (one deleted, one added); two of them communicate.
    assert (ported.added, ported.deleted, ported.hunks, ported.communication) == (3, 1, 2, 2)
    assert ported.by_category == {"imports": 1, "process group and launch": 3}
    assert (broken.state, broken.source, broken.why) == ("broken", "torch/ddp.py", "hang: =no progress for 60 s")
    assert ported.proof is None


def test_bars_add_up_over_ported_cells() -> None:
    assert bars(required(evidence())) == {("torch", "cpu/dp2"): {"imports": 1, "process group and launch": 3}}


def test_both_files_stand_beside_each_other() -> None:
    lines = side_by_side(changes.compare(BASELINE, PORT))
    assert [(line.old, line.new, line.hunk) for line in lines] == [
        ((1, '"""Doc."""'), (1, '"""Doc."""'), None),
        ((2, "import torch"), (2, "import torch"), None),
        (None, (3, "import torch.distributed as dist"), 1),
        ((3, ""), (4, ""), None),
        ((4, "# a note"), None, None),
        ((5, "model = Model()"), (5, "model = Model()"), None),
        ((6, "print(1)"), (6, "if dist.get_rank() == 0:"), 2),
        (None, (7, "    print(1)"), 2),
        ((7, "end"), (8, "end"), None),
    ]


def test_every_line_of_shipped_ports_is_shown_once() -> None:
    root = Path(__file__).parents[2] / "workloads"
    for port in root.glob("*/*/*.py"):
        comparison = changes.compare_files(port.with_name("train.py"), port)
        lines = side_by_side(comparison)
        assert [line.old[0] for line in lines if line.old] == list(range(1, len(comparison.baseline.lines) + 1))
        assert [line.new[0] for line in lines if line.new] == list(range(1, len(comparison.port.lines) + 1))


def test_a_port_is_shown_once_with_the_cells_that_tried_it_and_what_they_say_of_its_hunks() -> None:
    found = evidence("required", "idle")
    (port,) = differences(found)
    assert (port.workload, port.baseline, port.port) == ("gpt", "torch/train.py", "torch/ddp.py")
    assert port.cells == {"gpt/torch/cpu/dp2": True, "gpt/torch/cuda/dp2": False}
    assert port.marks() == {
        1: [Mark("required", "because 1", "gpt/torch/cpu/dp2")],
        2: [Mark("idle", "because 2", "gpt/torch/cpu/dp2")],
    }
    assert differences(evidence())[0].marks() == {}
    assert [hunk.id for hunk in required(found)[0].unneeded] == [2]


def test_what_is_not_known_is_not_counted_as_nothing(tmp_path: Path) -> None:
    made = MadeUpRun(sources={"gpt/torch/train.py": BASELINE, "gpt/torch/ddp.py": "x = (\n"})
    cell = planned("gpt", "torch", "cpu", "dp2")
    no = failure("idle-devices", "1 did work")
    made.add(cell, attempt(cell, "fail", failure=no), attempt(cell, role="port"))
    found = merge([made.journal()])
    (unknown,) = required(found)
    assert (unknown.communication, unknown.by_category) == (None, None)
    assert bars([unknown]) == {}
    assert differences(found) == []
    assert "| not known | not known |" in markdown(found)
    write_csv(found, tmp_path / "changes.csv")
    with (tmp_path / "changes.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["communication"], row["imports"]) == ("", "")


def test_the_exports_say_the_same(tmp_path: Path) -> None:
    found = evidence("required", "idle")
    assert "| +3 -1 | 2 | 2 | process group and launch | 1 required, 1 idle |" in markdown(found)
    assert "hang" in markdown(found)
    assert markdown(merge([MadeUpRun().journal()])) == ""
    write_csv(found, tmp_path / "changes.csv")
    with (tmp_path / "changes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["process group and launch"], rows[0]["required"], rows[0]["idle"]) == ("3", "1", "1")
    assert (rows[1]["state"], rows[1]["required"]) == ("broken", "")
