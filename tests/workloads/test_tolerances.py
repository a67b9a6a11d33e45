"""The tolerances in workload.yaml rest on what was measured, with headroom, and not on more."""

import csv

import pytest

WORKLOADS = ["digits", "resnet", "gpt"]


def measured(scripts, workload: str, precision: str) -> float:
    with (scripts.folder(workload) / "tolerance.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["precision"] == precision]
    assert {row["framework"] for row in rows} == {"torch", "jax"}
    return max(float(row["deviation"]) for row in rows)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("precision", ["ieee-f32", "bf16"])
def test_a_tolerance_is_two_to_ten_times_the_largest_measured_deviation(scripts, workload, precision):
    assert 2 < scripts.tolerance(workload, precision) / measured(scripts, workload, precision) < 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_that_of_tf32_lies_between_float32_and_bfloat16(scripts, workload):
    # Not measured: no CPU has TF32. Its mantissa has three bits more than that of bfloat16.
    tf32 = scripts.tolerance(workload, "tf32")
    assert scripts.tolerance(workload, "ieee-f32") < tf32
    assert scripts.tolerance(workload, "bf16") / 16 < tf32 < scripts.tolerance(workload, "bf16") / 2


def test_digits_cuda_has_the_tolerances_of_digits(scripts):
    assert scripts.description("digits-cuda")["reference"] == scripts.description("digits")["reference"]
