"""The runner: from a cell to its attempts."""

import textwrap
from dataclasses import replace
from typing import Any

import pytest

from matrix import accelerators, judge, runner
from matrix.attempt import blank
from matrix.journal import AttemptRecord, Failure, Metrics
from matrix.plan import Cell
from tests.matrix.harness import DIGITS, Bench, digits, edited

SAME_BATCH = ("(turn + 1) * BATCH][rank::world_size]", "(turn + 1) * BATCH]")


def test_a_correct_script_passes_as_it_is(bench: Bench) -> None:
    digits(bench)
    verdict = bench.verdict(bench.cell("edited"))
    assert (verdict.verdict, verdict.why) == ("as-is", "device-agnostic source")


def test_ports_are_tried_after_the_baseline_has_failed(bench: Bench) -> None:
    digits(bench)
    attempts = bench.attempts(bench.cell("edited", layout="dp2"))
    assert [(a.source, a.outcome, a.failure and a.failure.cause) for a in attempts] == [
        ("torch/train.py", "fail", "idle-devices"),
        ("torch/ddp.py", "pass", None),
    ]


SPAWNING = """
    import os
    import runpy
    import socket

    import torch.multiprocessing as mp


    def rank(number, port):
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runpy.run_path("torch/ddp.py", run_name="__main__")


    if __name__ == "__main__":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(rank, args=(port,), nprocs=2)
"""


def test_a_script_that_spawns_its_ranks_itself_is_watched_in_all_of_them(bench: Bench) -> None:
    digits(bench, torch_train=textwrap.dedent(SPAWNING))
    (attempt,) = bench.attempts(bench.cell("edited", layout="dp2"))
    assert (attempt.source, attempt.outcome, attempt.devices.used) == ("torch/train.py", "pass", 2)


def test_ranks_that_a_script_spawns_with_the_same_batch_are_found_out(bench: Bench) -> None:
    same = edited(DIGITS / "torch" / "ddp.py", SAME_BATCH)
    digits(bench, torch_train=textwrap.dedent(SPAWNING), torch_ddp=same)
    attempt = bench.attempts(bench.cell("edited", layout="dp2"))[0]
    assert attempt.failure is not None
    assert attempt.failure.cause == "replicated-work"


def test_ranks_that_shuffle_the_same_batch_are_found_out_by_its_rows(bench: Bench) -> None:
    shuffled = "(turn + 1) * BATCH][np.random.default_rng(rank).permutation(BATCH)]"
    digits(bench, torch_ddp=edited(DIGITS / "torch" / "ddp.py", (SAME_BATCH[0], shuffled)))
    failure = bench.attempts(bench.cell("edited", layout="dp2"))[-1].failure
    assert failure is not None
    assert (failure.cause, failure.message) == (
        "replicated-work",
        "rank 0 and rank 1 were fed the same rows: 100% of a batch",
    )


def test_a_script_that_trains_past_its_steps_is_not_green(bench: Bench) -> None:
    longer = ("range(1, args.steps + 1)", "range(1, args.steps + 3)")
    digits(bench, torch_train=edited(DIGITS / "torch" / "train.py", longer))
    failure = bench.attempts(bench.cell("edited"))[0].failure
    assert failure is not None
    assert (failure.cause, failure.message) == ("wrong-result", "went on to step 8, although 6 steps were asked for")


def test_settings_can_be_passed_as_keys_and_lines_be_read_by_a_pattern(bench: Bench) -> None:
    train = edited(
        DIGITS / "torch" / "train.py",
        ("args = parser.parse_args()", "import sys\nargs = parser.parse_args([f'--{each}' for each in sys.argv[1:]])"),
        ('print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)',
         'print(f"[{step}] {loss.item():.12g} ({(step - logged) * BATCH})", flush=True)'),
    )  # fmt: skip
    folder = digits(bench, torch_train=train)
    text = (folder / "workload.yaml").read_text()
    for setting in ("steps", "size", "seed", "dtype", "log_every"):
        flag = setting.replace("_", "-")
        text = text.replace(f"{setting}: --{flag}", f"{setting}: {flag}=")
    text += r"progress: '^\[(?P<step>\d+)\] (?P<loss>\S+) \((?P<examples>\d+)\)'" + "\n"
    (folder / "workload.yaml").write_text(text)
    (attempt,) = bench.attempts(bench.cell("edited"))
    assert (attempt.outcome, attempt.failure) == ("pass", None)
    assert attempt.metrics.eval is not None


# --- without processes: what comes of results that are given ---


def passing(loss: float = 2.0, evaluation: float = 1.0) -> dict[str, Any]:
    return {"outcome": "pass", "metrics": Metrics(loss=[(1, loss)], eval=evaluation, tolerance=1e-4)}


def failing(cause: str, loss: float = 2.0) -> dict[str, Any]:
    return {
        "outcome": "fail",
        "failure": Failure(cause=cause, message=cause),
        "metrics": Metrics(loss=[(1, loss)], tolerance=1e-4),
    }


@pytest.fixture
def planned(bench: Bench) -> Cell:
    """A cell with a baseline and a port."""
    scripts = {"baseline": {"file": "train.py"}, "ports": [{"file": "port.py", "for": {"strategy": "single"}}]}
    texts = {"train.py": "print()\n", "port.py": "print(1)\n"}
    bench.workload("w", texts, {"torch": scripts}, reference="step,loss\n1,2.0\n")
    return bench.cell("w", steps=1, log_every=1, repeats=2, measure={"steps": 1, "log_every": 1})


def attempted(
    bench: Bench, cell: Cell, monkeypatch: pytest.MonkeyPatch, results: list[dict[str, Any]], **more: Any
) -> list[AttemptRecord]:
    """What the runner makes of it when processes come out like `results`, one after the other."""
    left = iter(results)

    def perform(context: Any, cell: Cell, source: Any, phase: Any) -> AttemptRecord:
        return AttemptRecord(
            **blank(context, cell, source, phase), evidence="executed", precision="ieee-f32", **next(left)
        )

    monkeypatch.setattr(runner, "perform", perform)
    made = bench.attempts(cell, **more)
    assert next(left, None) is None, "not all of the results were asked for"
    return made


@pytest.mark.parametrize(
    ("results", "causes", "verdict"),
    [
        ([passing(), passing()], [None, None], "as-is"),
        # wrong once, then right, and so little apart that each alone may be rounding
        ([failing("wrong-result", 2.0003), passing(2.0002), passing(), passing()],
         ["wrong-result", None, None, None], "ported"),
        ([failing("wrong-result", 9.0), passing(), passing(), passing()],
         ["wrong-result", "nondeterministic", None, None], "ported"),
        ([passing(), failing("hang"), passing(), passing()], [None, "hang", None, None], "ported"),
        ([passing(), passing(evaluation=1.1), passing(), passing()],
         [None, "nondeterministic", None, None], "ported"),
        ([passing(), failing("network"), passing()], [None, "network", None], "as-is"),
        ([passing(), failing("hang"), passing(), failing("hang")], [None, "hang", None, "hang"], "broken"),
    ],
)  # fmt: skip
def test_a_source_passes_only_if_all_of_its_repeats_do(
    bench: Bench,
    planned: Cell,
    monkeypatch: pytest.MonkeyPatch,
    results: list[dict[str, Any]],
    causes: list[str | None],
    verdict: str,
) -> None:
    made = attempted(bench, planned, monkeypatch, results)
    assert [a.failure and a.failure.cause for a in made] == causes
    assert judge.judge([planned.planned()], made)[0].verdict == verdict


def test_a_resumed_run_makes_the_repeats_that_are_missing_and_holds_them_against_the_first(
    bench: Bench, planned: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = attempted(bench, planned, monkeypatch, [passing(), passing()])
    assert attempted(bench, planned, monkeypatch, [], prior=tuple(known)) == []
    (second,) = attempted(bench, planned, monkeypatch, [passing()], prior=tuple(known[:1]))
    assert second.outcome == "pass"
    made = attempted(bench, planned, monkeypatch, [passing(2.1), passing(), passing()], prior=tuple(known[:1]))
    assert [a.failure and a.failure.cause for a in made] == ["nondeterministic", None, None]


def test_a_wrong_repeat_of_an_earlier_run_is_not_forgotten(
    bench: Bench, planned: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    prior = attempted(
        bench, planned, monkeypatch, [failing("wrong-result", 2.0003), passing(2.0002), passing(), passing()]
    )
    assert attempted(bench, planned, monkeypatch, [], prior=tuple(prior)) == []


def test_a_source_edited_since_its_accelerator_was_there_is_not_what_was_executed(
    bench: Bench, planned: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    prior = tuple(attempted(bench, planned, monkeypatch, [failing("hang"), passing(), passing()]))
    gone = replace(planned, accelerator=replace(accelerators.available()["cpu"], absent=lambda: "it is gone"))

    def verdict() -> str:
        return judge.judge([gone.planned()], [*prior, *bench.attempts(gone, prior=prior)])[0].verdict

    assert verdict() == "ported"
    (planned.workload.folder / "port.py").write_text("print(2)\n")
    assert verdict() == "broken"  # of the baseline it is still known
    (planned.workload.folder / "train.py").write_text("print(2)\n")
    assert verdict() == "unproven"
