"""Numbers against a reference: every expected value is written out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from matrix.accuracy import compare, deviation, evaluation_at, first_not_finite, missing, precision, tolerance
from matrix.journal import Reference
from matrix.truth import Finding

FROM_1 = Reference(loss=[(1, 2.0), (2, 1.0), (3, 0.5)], eval=4.0, evaluations={2: 8.0}, tolerance={"ieee-f32": 0.25})
FROM_0 = Reference(loss=[(0, 2.0), (1, 1.0), (2, 0.5)], tolerance={"ieee-f32": 0.25, "ieee-f64": 0.125})
SPARSE = Reference(loss=[(10, 2.0), (20, 1.0), (30, 0.5)], tolerance={"ieee-f32": 0.25})


# --- precision ---


def torch(*dtypes: str, convolution: bool = False, **setting: Any) -> dict[str, Any]:
    counts = {dtype: 1 for dtype in dtypes}
    return {"framework": "torch", "dtypes": counts, "convolution": convolution, "matmul_precision": setting}


def jax(*dtypes: str) -> dict[str, Any]:
    return {"framework": "jax", "dtypes": {dtype: 1 for dtype in dtypes}, "matmul_precision": {"matmul": "None"}}


@pytest.mark.parametrize(
    ("seen", "accelerator", "expected"),
    [
        # PyTorch: set_float32_matmul_precision, and what cuDNN may do by default
        (torch("float32", matmul="highest"), "cpu", "ieee-f32"),
        (torch("float32", matmul="high"), "cpu", "ieee-f32"),
        (torch("float32", matmul="medium"), "cpu", "bf16"),
        (torch("float32", matmul="highest"), "cuda", "ieee-f32"),
        (torch("float32", matmul="high"), "cuda", "tf32"),
        (torch("float32", matmul="medium"), "cuda", "tf32"),
        (torch("float32", matmul="highest", cudnn_tf32=True), "cuda", "ieee-f32"),
        (torch("float32", matmul="highest", cudnn_tf32=True, convolution=True), "cuda", "tf32"),
        (torch("float32", matmul="highest", cudnn_tf32=False, convolution=True), "cuda", "ieee-f32"),
        (torch("float32", matmul="high"), "rocm", "ieee-f32"),
        (torch("float32", matmul="highest"), "tpu", "bf16"),
        # its newer words, library by library
        (torch("float32", matmul="highest", mkldnn="bf16"), "cpu", "bf16"),
        (torch("float32", matmul="highest", mkldnn="tf32"), "cpu", "tf32"),
        (torch("float32", matmul="highest", mkldnn="none", cuda="tf32"), "cpu", "ieee-f32"),
        (torch("float32", matmul="highest", cuda="tf32"), "cuda", "tf32"),
        (torch("float32", matmul="highest", cuda="ieee", cudnn="tf32"), "cuda", "ieee-f32"),
        (torch("float32", matmul="highest", cuda="ieee", cudnn="tf32", convolution=True), "cuda", "tf32"),
        # other dtypes; the coarsest of several
        (torch("float64", matmul="medium"), "cpu", "ieee-f64"),
        (torch("bfloat16"), "cpu", "bf16"),
        (torch("float16"), "cuda", "f16"),
        (torch("float32", "bfloat16", matmul="highest"), "cuda", "bf16"),
        (torch("float64", "float32", matmul="highest"), "cpu", "ieee-f32"),
        (torch("float16", "bfloat16"), "cuda", "f16"),
        # JAX: what each product asks for, and what the chip makes of it
        (jax("f32/DEFAULT"), "cpu", "ieee-f32"),
        (jax("f32/DEFAULT"), "cuda", "tf32"),
        (jax("f32/HIGH"), "cuda", "tf32"),
        (jax("f32/HIGHEST"), "cuda", "ieee-f32"),
        (jax("f32/DEFAULT"), "rocm", "ieee-f32"),
        (jax("f32/DEFAULT"), "tpu", "bf16"),
        (jax("f32/HIGH"), "tpu", "tf32"),
        (jax("f32/HIGHEST"), "tpu", "ieee-f32"),
        (jax("f32/HIGHEST", "f32/DEFAULT"), "tpu", "bf16"),
        (jax("f64/DEFAULT"), "cpu", "ieee-f64"),  # x64
        (jax("bf16/DEFAULT"), "cpu", "bf16"),
        (jax("f16/HIGHEST"), "cuda", "f16"),
        # products of integers say nothing
        (jax("i32/DEFAULT"), "cpu", None),
        (torch(), "cpu", None),
    ],
)
def test_the_effective_precision_is_the_coarsest_of_any_product(
    seen: dict[str, Any], accelerator: str, expected: str | None
) -> None:
    assert precision([seen], accelerator) == expected


def test_without_a_product_the_parameters_tell() -> None:
    assert precision([torch() | {"parameter_dtypes": ["float32"]}], "cpu") == "ieee-f32"
    assert precision([jax() | {"parameter_dtypes": ["f32"]}], "tpu") == "bf16"


def test_the_coarsest_rank_counts() -> None:
    assert precision([torch("float32", matmul="highest"), torch("bfloat16")], "cpu") == "bf16"
    assert precision([], "cpu") is None


def test_float64_is_held_to_the_tolerance_of_float32_where_it_has_none() -> None:
    assert tolerance(FROM_1, "ieee-f64") == 0.25
    assert tolerance(FROM_0, "ieee-f64") == 0.125
    assert tolerance(FROM_0, "bf16") is None


# --- values ---


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [(2.5, 2.0, 0.25), (1.5, -2.0, 1.75), (0.0, 0.0, 0.0), (1e-9, 0.0, math.inf), (0.0, 2.0, 1.0)],
)
def test_the_deviation_is_relative_to_the_reference(value: float, reference: float, expected: float) -> None:
    assert deviation(value, reference) == expected


def test_a_value_exactly_at_the_limit_is_within_it() -> None:
    assert compare([(1, 2.5)], None, FROM_1, 0.25) == (None, 0.25)
    found, off = compare([(1, math.nextafter(2.5, 3))], None, FROM_1, 0.25)
    assert isinstance(found, Finding)
    assert off > 0.25


def test_the_first_value_outside_is_named_and_the_largest_deviation_told() -> None:
    found, off = compare([(1, 2.0), (2, 1.5), (3, 1.0)], None, FROM_1, 0.25)
    assert found == Finding("wrong-result", "step 2: loss 1.5, reference 1: off by 0.5 relative, tolerance 0.25")
    assert off == 1.0


@pytest.mark.parametrize(
    ("printed", "hint"),
    [
        (2.31, "it is the reference, rounded: print more digits"),
        (2.3075, "it is the reference, rounded: print more digits"),
        (2.0, "it is the reference, rounded: print more digits"),
        (1.9876543, "it is the reference of the next step: are its steps counted from 0?"),
        (2.32, None),
        (2.307, None),
    ],
)
def test_a_slip_in_printing_or_counting_is_named(printed: float, hint: str | None) -> None:
    reference = Reference(loss=[(1, 2.307514), (2, 1.987654)], tolerance={"ieee-f32": 1e-6})
    found, _ = compare([(1, printed)], None, reference, 1e-6)
    assert found is not None
    assert found.message.endswith(f"tolerance 1e-06{'; ' + hint if hint else ''}")


def test_steps_count_from_where_the_reference_counts() -> None:
    assert compare([(0, 2.0), (1, 1.0)], None, FROM_0, 0.0) == (None, 0.0)
    assert compare([(1, 2.0)], None, FROM_0, 0.25)[1] == 1.0


def test_steps_that_the_reference_leaves_out_are_not_compared() -> None:
    assert compare([(1, 9.0), (10, 2.0), (15, 9.0), (20, 1.0)], None, SPARSE, 0.0) == (None, 0.0)


def test_an_evaluation_is_held_to_the_one_of_its_step() -> None:
    losses = [(1, 2.0), (2, 1.0)]
    assert evaluation_at(FROM_1, 2) == 8.0
    assert evaluation_at(FROM_1, 3) == 4.0
    assert evaluation_at(FROM_1, 1) is None
    assert compare(losses, 8.0, FROM_1, 0.0) == (None, 0.0)
    assert compare(losses, 4.0, FROM_1, 0.25)[0] == Finding(
        "wrong-result", "eval 4, reference 8: off by 0.5 relative, tolerance 0.25"
    )
    assert compare([*losses, (3, 0.5)], 4.0, FROM_1, 0.0) == (None, 0.0)


def test_the_first_value_that_is_not_finite_is_named() -> None:
    assert first_not_finite([(1, 2.0), (2, math.nan), (3, math.inf)], None) == Finding(
        "not-finite", "the loss of step 2 is nan"
    )
    assert first_not_finite([(1, 2.0)], -math.inf) == Finding("not-finite", "the closing evaluation is -inf")
    assert first_not_finite([(1, 2.0)], 1.0) is None
    assert first_not_finite([], None) is None


# --- completeness ---


def lines(*steps: int) -> list[tuple[int, float]]:
    return [(step, 1.0) for step in steps]


ENDED = "ended after step {} of {}"
UNKNOWN = "{}none of the steps that it printed is in the reference, up to step {}"
ABSENT = "printed no line for step {} ({} of {} missing)"


@pytest.mark.parametrize(
    ("reported", "reference", "steps", "log_every", "message"),
    [
        (lines(1, 2, 3), FROM_1, 3, 1, None),
        (lines(1, 2), FROM_1, 3, 1, ENDED.format(2, 3)),
        (lines(1, 3), FROM_1, 3, 1, ABSENT.format(2, 1, 3)),
        (lines(3), FROM_1, 3, 1, ABSENT.format(1, 2, 3)),
        (lines(0, 1, 2), FROM_0, 3, 1, None),
        (lines(0, 1), FROM_0, 3, 1, ENDED.format(1, 3)),
        (lines(1, 2), FROM_0, 3, 1, ABSENT.format(0, 1, 3)),
        # without a reference the script's own first step tells how it counts
        (lines(0, 1, 2), None, 3, 1, None),
        (lines(0, 1), None, 3, 1, ENDED.format(1, 3)),
        (lines(1, 2, 3), None, 3, 1, None),
        (lines(1, 2), None, 3, 1, ENDED.format(2, 3)),
        # every tenth step, whether or not the first and the last are printed too
        (lines(10, 20, 30), None, 30, 10, None),
        (lines(1, 10, 20, 30), None, 30, 10, None),
        (lines(1, 10, 20), None, 25, 10, None),
        (lines(1, 10, 30), None, 30, 10, ABSENT.format(20, 1, 3)),
        (lines(1, 10), None, 25, 10, ENDED.format(10, 25)),
        (lines(0, 10, 20), None, 30, 10, None),
        (lines(5), None, 5, 10, None),
        # a reference that was logged every tenth step
        (lines(10, 20, 30), SPARSE, 30, 10, None),
        (lines(1, 10, 20, 30), SPARSE, 30, 10, None),
        (lines(10, 20), SPARSE, 30, 10, ENDED.format(20, 30)),
        (lines(10, 30), SPARSE, 30, 10, ABSENT.format(20, 1, 3)),
        # a script that takes no log_every prints when it likes, but to the end
        (lines(1, 3), FROM_1, 3, None, None),
        (lines(1, 2), FROM_1, 3, None, ENDED.format(2, 3)),
        # one that takes no steps goes to the end of the reference, and no further
        (lines(1, 3), FROM_1, None, None, None),
        (lines(1), FROM_1, None, None, "ended after step 1, the reference goes on to step 3"),
        (lines(1), None, None, None, None),
        (lines(1, 2, 3, 4), SPARSE, None, None, "ended after step 4, the reference goes on to step 30"),
        (lines(10, 20, 30, 31), SPARSE, None, None, UNKNOWN.format("after step 30, ", 31)),
        # losses that nobody compared, all of them or the last
        (lines(1, 2, 3), SPARSE, 3, 1, UNKNOWN.format("", 3)),
        (lines(10, 20, 25), SPARSE, 25, 5, UNKNOWN.format("after step 20, ", 25)),
        (lines(10, 20), SPARSE, 25, 10, None),
    ],
)  # fmt: skip
def test_every_step_that_was_asked_for_is_due(
    reported: list[tuple[int, float]],
    reference: Reference | None,
    steps: int | None,
    log_every: int | None,
    message: str | None,
) -> None:
    found = missing(reported, 4.0, reference, steps, log_every)
    assert found == (Finding("incomplete", message) if message else None)


def test_an_evaluation_that_the_reference_has_is_due() -> None:
    assert missing(lines(1, 2, 3), None, FROM_1, 3, 1) == Finding(
        "incomplete", "ended without the line 'eval=' that the reference asks for"
    )
    assert missing(lines(0, 1, 2), None, FROM_0, 3, 1) is None


def test_an_evaluation_after_the_last_step_is_a_comparison_of_it() -> None:
    reference = SPARSE.model_copy(update={"evaluations": {25: 8.0}})
    assert missing(lines(10, 20, 25), 8.0, reference, 25, 5) is None
    assert missing(lines(10, 20, 25), None, reference, 25, 5) is not None
