"""Whether the numbers are right: the losses of an attempt against the float64 reference, at its matmul precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matrix.journal import Reference
from matrix.truth import Finding, Seen

PRECISIONS = ("f16", "bf16", "tf32", "ieee-f32", "ieee-f64")
"""Effective matmul precisions, the coarsest first."""

BY_DTYPE = {
    "float16": "f16", "f16": "f16", "fp16": "f16", "half": "f16",
    "bfloat16": "bf16", "bf16": "bf16",
    "float32": "ieee-f32", "f32": "ieee-f32", "fp32": "ieee-f32", "float": "ieee-f32",
    "float64": "ieee-f64", "f64": "ieee-f64", "fp64": "ieee-f64", "double": "ieee-f64",
}  # fmt: skip
"""The matmul precision that a dtype has where nothing lowers it."""


def precision(seen: Iterable[Seen], accelerator: str) -> str | None:
    """The effective matmul precision of what was seen: the coarsest that any matrix product ran at.

    A float32 product is not always one: TF32 on NVIDIA (PyTorch when it is allowed, JAX by default), bfloat16 passes
    on a TPU (JAX by default), bfloat16 on a CPU under PyTorch's "medium".
    """
    found: set[str] = set()
    for each in seen:
        setting = each.get("matmul_precision", {})
        dtypes = list(each.get("dtypes", {})) or list(each.get("parameter_dtypes", ()))
        for word in dtypes:
            dtype, _, asked = word.partition("/")
            name = BY_DTYPE.get(dtype)
            if name == "ieee-f32":
                if each.get("framework") == "jax":
                    name = _jax_float32(asked or "DEFAULT", accelerator)
                else:
                    name = _torch_float32(setting, bool(each.get("convolution")), accelerator)
            if name:
                found.add(name)
    return min(found, key=PRECISIONS.index) if found else None


def _jax_float32(asked: str, accelerator: str) -> str:
    if asked == "HIGHEST" or accelerator not in ("tpu", "cuda"):
        return "ieee-f32"
    if accelerator == "tpu":
        return "bf16" if asked == "DEFAULT" else "tf32"  # HIGH: three bfloat16 passes, about TF32's error
    return "tf32"


def _torch_float32(setting: Mapping[str, Any], convolution: bool, accelerator: str) -> str:
    """In PyTorch's older words (`matmul`, `cudnn_tf32`), and in those of each library where it has them."""
    if setting.get("xla"):
        return _jax_float32(setting["xla"].upper(), accelerator)
    matmul = setting.get("matmul", "highest")
    if accelerator == "tpu":
        return "bf16"
    if accelerator == "cpu":
        asked = {setting.get("mkldnn"), "bf16" if matmul == "medium" else None}
        return next((name for name in ("bf16", "tf32") if name in asked), "ieee-f32")
    if accelerator == "cuda":
        lowered = matmul != "highest" or setting.get("cuda") == "tf32"
        if convolution:
            lowered = lowered or bool(setting.get("cudnn_tf32")) or setting.get("cudnn") == "tf32"
        return "tf32" if lowered else "ieee-f32"
    return "ieee-f32"


def tolerance(reference: Reference, at: str) -> float | None:
    """The relative tolerance at an effective precision; float64 is held to float32's where it has none of its own."""
    found = reference.tolerance.get(at)
    return reference.tolerance.get("ieee-f32") if found is None and at == "ieee-f64" else found


def first_not_finite(losses: Sequence[tuple[int, float]], evaluation: float | None) -> Finding | None:
    """The first loss that is NaN or infinite."""
    for step, loss in losses:
        if not math.isfinite(loss):
            return Finding("not-finite", f"the loss of step {step} is {loss}")
    if evaluation is not None and not math.isfinite(evaluation):
        return Finding("not-finite", f"the closing evaluation is {evaluation}")
    return None


def deviation(value: float, reference: float) -> float:
    """`|value - reference| / |reference|`; for a reference of 0, 0 when equal and infinite otherwise."""
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def compare(
    losses: Sequence[tuple[int, float]], evaluation: float | None, reference: Reference, limit: float
) -> tuple[Finding | None, float]:
    """Hold every logged loss, and the evaluation where the reference has one for that step, to the reference.

    Returns:
        The first value outside `limit`, and the largest relative deviation over all values.
    """
    expected = dict(reference.loss)
    largest, finding = 0.0, None
    pairs = [(f"step {step}: loss", loss, expected.get(step), expected.get(step + 1)) for step, loss in losses]
    if evaluation is not None and losses:
        pairs.append(("eval", evaluation, evaluation_at(reference, losses[-1][0]), None))
    for name, value, wanted, following in pairs:
        if wanted is None:
            continue
        off = deviation(value, wanted)
        largest = max(largest, off)
        if finding is None and off > limit:
            finding = Finding(
                "wrong-result",
                f"{name} {value:.9g}, reference {wanted:.9g}: off by {off:.2g} relative, tolerance {limit:.2g}"
                + _slip(value, wanted, following, limit),
            )
    return finding, largest


def _slip(value: float, wanted: float, following: float | None, limit: float) -> str:
    """What a wrong value looks like that is a slip in printing or counting rather than in computing."""
    if any(value in (round(wanted, digits), float(f"{wanted:.{digits}g}")) for digits in range(1, 8)):
        return "; it is the reference, rounded: print more digits"
    if following is not None and deviation(value, following) <= limit:
        return "; it is the reference of the next step: are its steps counted from 0?"
    return ""


def evaluation_at(reference: Reference, step: int) -> float | None:
    """The reference's evaluation after `step`; it has one after its last step, and may have others."""
    found = reference.evaluations.get(step)
    if found is None and reference.loss and step == reference.loss[-1][0]:
        return reference.eval
    return found


def missing(
    losses: Sequence[tuple[int, float]],
    evaluation: float | None,
    reference: Reference | None,
    steps: int | None,
    log_every: int | None,
) -> Finding | None:
    """What a script that ended cleanly did not report: a step that was asked for, or the evaluation.

    Args:
        losses: `(step, loss)` as printed.
        evaluation: the value of `eval=`, if there was one.
        reference: tells how the workload counts its steps, and whether it evaluates.
        steps: how many steps were asked for; None when the workload takes no such argument.
        log_every: every how many steps a line was asked for; None likewise.

    With a reference, something of what was printed last must be in it: losses that nobody compared prove nothing.
    """
    reported = {step for step, _ in losses}
    last = max(reported, default=None)
    if steps is not None and last is not None:
        first = 0 if 0 in (reported if reference is None else {reference.loss[0][0]}) else 1
        counted = list(range(first, first + steps))
        if reference is not None:
            counted = [step for step, _ in reference.loss if step < first + steps]
        every = log_every or 1
        due = [step for step in counted if step % every == 0] or counted[-1:]
        if log_every is None:
            due = [step for step in counted[-1:] if step > last]
        absent = [step for step in due if step not in reported]
        if absent and last < due[-1]:
            return Finding("incomplete", f"ended after step {last} of {steps}")
        if last >= first + steps:
            return Finding("wrong-result", f"went on to step {last}, although {steps} steps were asked for")
        if absent:
            return Finding("incomplete", f"printed no line for step {absent[0]} ({len(absent)} of {len(due)} missing)")
    if reference is None or last is None:
        return None
    end = reference.loss[-1][0]
    if steps is None and last < end:
        return Finding("incomplete", f"ended after step {last}, the reference goes on to step {end}")
    if reference.eval is not None and evaluation is None:
        return Finding("incomplete", "ended without the line 'eval=' that the reference asks for")
    compared = reported & {step for step, _ in reference.loss}
    if last not in compared and (evaluation is None or evaluation_at(reference, last) is None):
        after = f"after step {max(compared)}, " if compared else ""
        return Finding("incomplete", f"{after}none of the steps that it printed is in the reference, up to step {last}")
    return None
