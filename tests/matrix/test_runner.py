"""The runner: from a cell to its attempts."""

from tests.matrix.harness import Bench, digits


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
