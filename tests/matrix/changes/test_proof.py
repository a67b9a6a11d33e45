"""`run --prove-changes`, with a framework that needs a tenth of a second for a cell."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from matrix import journal, judge
from matrix.changes import proof
from matrix.journal import HunkProof, ProofRecord
from tests.matrix.toy import Toy, train


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


FEW_STEPS = {"steps": 3, "timeout": 60, "measure": {"processes": 1, "steps": 6, "log_every": 2}}
"""Too few for a steady step time, so that the speed of these microseconds decides nothing."""
LINES = "factor = 2\nk = 0\ntext = 'x'\nk = 1\nlate = 0\nk = 2\n"
PORTED = (
    "factor = 2\nk = 0\n# a note that goes\ntext = json.dumps('x')\nk = 1\nlate = 0\n"
    "if factor != 2:\n    math.sqrt(factor)\nfactor = 1\nk = 2\n"
)


def wrong_by_a_factor(lines: str, imports: str = "", modules: str = "argparse") -> str:
    script = train(before=lines).replace("{1 / step", "{factor / step")
    return script.replace("import argparse,", f"{imports}import {modules},")


def proofs(toy: Toy) -> list[ProofRecord]:
    return journal.read(toy.journals()[-1]).proofs


def test_each_hunk_of_a_port_is_required_or_idle_and_the_patch_of_the_rest_passes(toy: Toy, tmp_path: Path) -> None:
    baseline = wrong_by_a_factor(LINES)
    port = wrong_by_a_factor(PORTED, "import json\n").replace("import toyframe\n", "import toyframe\nimport math\n")
    folder = toy.workload("job", baseline, port)
    toy.write(run=FEW_STEPS)
    run = toy.run("--prove-changes")
    assert run.returncode == 1, run.stdout + run.stderr  # an idle hunk is not as it should be
    (record,) = proofs(toy)
    assert (record.cell, record.source, record.complete) == ("job/toy/cpu/single", "port.py", True)
    assert [(each.verdict, each.why.partition(":")[0], each.needed_by) for each in record.hunks] == [
        ("idle", "the cell passes without it; speed not measured", []),  # import json, once its use is gone
        ("required", "hunk 4 uses what it defines", [4]),  # import math, for a line that no run comes to
        ("idle", "the cell passes without it; speed not measured", []),  # json.dumps
        ("required", "wrong-result", []),  # factor = 1
    ]
    assert [trial.without for trial in record.trials] == [[4], [3], [2, 3], [1, 3]]
    assert "job/port.py: no proven cell needs hunk 1, 3" in run.stdout

    patch = toy.journals()[-1].parent / (record.minimal or "")
    fresh = tmp_path / "fresh"
    shutil.copytree(folder, fresh)
    subprocess.run(["git", "apply", str(patch)], cwd=fresh, check=True, capture_output=True)
    minimal = (fresh / "train.py").read_text()
    assert "json" not in minimal
    assert "factor = 1\n" in minimal
    assert "a note" not in minimal
    toy.workload("again", minimal)
    toy.write(run=FEW_STEPS)
    assert toy.run("--select", "workload=again").returncode == 0
    assert toy.tries()[0] == ("again", 1, "correctness", "train.py", "pass")


def test_without_a_measurement_a_proof_does_not_say_whether_a_hunk_makes_the_cell_faster(toy: Toy) -> None:
    baseline = wrong_by_a_factor("factor = 2\nk = 0\nlate = 1\n")
    toy.workload("job", baseline, baseline.replace("factor = 2", "factor = 1").replace("late = 1", "late = 0"))
    toy.write(run=FEW_STEPS)
    run = toy.run("--prove-changes", "--no-measure")
    assert run.returncode == 1, run.stdout + run.stderr
    (record,) = proofs(toy)
    assert [(each.verdict, each.slowdown) for each in record.hunks] == [("required", None), ("idle", None)]
    assert record.hunks[1].why == "the cell passes without it; speed not measured"
    assert {phase for _, _, phase, _, _ in toy.tries()} == {"correctness"}


def test_a_hunk_without_which_the_cell_is_only_slower_is_for_performance(toy: Toy) -> None:
    baseline = wrong_by_a_factor("factor = 2\nk = 0\nwait_s = 0.02\n").replace(
        "    if step ==", "    time.sleep(wait_s)\n    if step =="
    )
    port = baseline.replace("factor = 2", "factor = 1").replace("wait_s = 0.02", "wait_s = 0.001")
    toy.workload("job", baseline, port)
    toy.write(run={"steps": 3, "timeout": 60, "measure": {"processes": 1, "steps": 12, "log_every": 1}})
    run = toy.run("--prove-changes")
    assert run.returncode == 0, run.stdout + run.stderr
    (record,) = proofs(toy)
    assert [each.verdict for each in record.hunks] == ["required", "performance"]
    assert (record.hunks[1].slowdown or 0) > 2
    assert record.minimal_changes == record.changes


def test_a_proof_says_what_it_does_and_repeats_nothing_when_it_is_resumed(toy: Toy) -> None:
    baseline = train(before="a = 1\nraise SystemExit(3)\nb = 2\n")
    toy.workload("job", baseline, baseline.replace("raise SystemExit(3)\n", ""))
    toy.write()
    first = toy.run("--prove-changes")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "job/toy/cpu/single port.py: 1 hunk, one run for each" in first.stdout
    assert "[1/1] hunk 1 (after line" in first.stdout
    assert "required: exit: " in first.stdout
    known = len(toy.records("proof"))
    again = toy.run("--prove-changes", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(toy.records("proof")) == known


def test_a_budget_that_is_used_up_leaves_the_proof_for_a_resumed_run(toy: Toy) -> None:
    baseline = train(before="a = 1\nraise SystemExit(3)\nb = 2\n")
    toy.workload("job", baseline, baseline.replace("raise SystemExit(3)\n", ""))
    toy.write()
    assert toy.run().returncode == 0
    assert proofs(toy) == []
    assert toy.run("--resume", "--prove-changes", "--budget", "1e-9").returncode == judge.EXIT_INCOMPLETE
    assert [record for record in proofs(toy) if record.complete] == []
    assert toy.run("--resume", "--prove-changes").returncode == 0
    assert [record.complete for record in proofs(toy)] == [True]


def test_a_failure_by_chance_proves_nothing(toy: Toy, tmp_path: Path) -> None:
    """Without the hunk the script dies in its first run only."""
    once = "import pathlib\nmark = pathlib.Path('@')\nsafe = False\n".replace("@", str(tmp_path / "mark"))
    die = "if not safe and not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), 6)\n"
    baseline = wrong_by_a_factor(f"factor = 2\n{once}{die}")
    toy.workload("job", baseline, baseline.replace("safe = False", "safe = True").replace("factor = 2", "factor = 1"))
    (tmp_path / "mark").touch()  # the baseline itself is only wrong
    toy.write(run=FEW_STEPS)
    assert toy.run().returncode == 0
    (tmp_path / "mark").unlink()
    assert toy.run("--prove-changes", "--resume").returncode == 0
    (record,) = proofs(toy)
    assert [hunk.verdict for hunk in record.hunks] == ["required", "unproven"]
    assert record.hunks[1].why.startswith("fails in one of two runs: crash: ")
    assert record.minimal_changes == record.changes


def test_the_workload_folder_of_a_variant_is_the_same_but_for_the_script(tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "torch" / "more").mkdir(parents=True)
    (there / "data").mkdir()
    for name in ("torch/ddp.py", "torch/common.py", "torch/more/x", "data/digits.csv"):
        (there / name).write_text(name)
    file = proof.mirror(there, tmp_path / "here", "torch/ddp.py")
    assert file == tmp_path / "here" / "torch" / "ddp.py"
    assert not file.exists()
    file.write_text("edited")
    assert (there / "torch/ddp.py").read_text() == "torch/ddp.py"
    for name in ("torch/common.py", "torch/more/x", "data/digits.csv"):
        assert (tmp_path / "here" / name).read_text() == name
    assert proof.mirror(there, tmp_path / "here", "torch/ddp.py") == file  # once more is no error


def hunk(number: int, verdict: str) -> HunkProof:
    return HunkProof.model_validate(
        {"id": number, "old": (1, 1), "new": (1, 1), "added": 1, "deleted": 1, "verdict": verdict}
    )


def test_a_hunk_is_idle_only_if_no_cell_needs_it() -> None:
    def record(cell: str, *verdicts: str, complete: bool = True) -> ProofRecord:
        return ProofRecord.model_validate(
            {
                "run": "r",
                "machine": "m",
                "cell": cell,
                "axes": {"workload": "job"},
                "key": cell,
                "source": "port.py",
                "baseline": "train.py",
                "changes": {"added": 1, "deleted": 1, "hunks": 2},
                "hunks": [hunk(number, verdict) for number, verdict in enumerate(verdicts, 1)],
                "complete": complete,
            }
        )

    found = proof.idle([record("a", "idle", "idle"), record("b", "required", "idle")])
    assert {port: [each.id for each in hunks] for port, hunks in found.items()} == {("job", "port.py"): [2]}
    assert proof.idle([record("a", "idle", "required", complete=False)]) == {}


def test_journals_without_proofs_and_with_fields_of_a_newer_version_are_read(toy: Toy) -> None:
    baseline = train(before="a = 1\nraise SystemExit(3)\nb = 2\n")
    toy.workload("job", baseline, baseline.replace("raise SystemExit(3)\n", ""))
    toy.write()
    assert toy.run("--prove-changes").returncode == 0
    path = toy.journals()[-1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["new_field"] = 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [record.complete for record in journal.read(path).proofs] == [True]
