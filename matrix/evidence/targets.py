"""The chips that can be compiled for without being here: what a definition may call them, and what is known of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from matrix.errors import UsageError, nearest
from matrix.evidence import GIB
from matrix.journal import Target

ANY = "any"
GPUS = Path(__file__).parent / "gpus"
"""A file for each NVIDIA GPU, as XLA's CUDA compiler takes it (`GpuTargetConfigProto` as text)."""
TPU_MEMORY = {"v5e": 16 * GIB, "v5p": 95 * GIB, "v6e": 32 * GIB}
"""High-bandwidth memory of a chip, which is one device (https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e)."""
_TPU = re.compile(r"([a-z0-9]+):(\d+(?:x\d+){1,2})")
_FIELD = re.compile(r'^\s*(device_memory_size|device_description_str): "?([^"\n]+)"?$', re.MULTILINE)


def describe(accelerator: str, name: str, slices: int = 1) -> Target:
    """What is known of a target before its compiler is asked.

    Raises:
        UsageError: there is no such target.
    """
    if slices > 1 and accelerator != "tpu":
        raise UsageError(f"only TPUs come in slices, and '{name}' is for {accelerator}")
    if name == ANY:
        return Target(accelerator=accelerator, name=name, about=accelerator.upper())
    if accelerator == "tpu":
        return _tpu(name, slices)
    if accelerator == "cuda":
        return _gpu(name)
    raise UsageError(f"{accelerator} has no compiler that works without one: expected '{ANY}', got '{name}'")


def _tpu(name: str, slices: int) -> Target:
    match = _TPU.fullmatch(name)
    if match is None:
        raise UsageError(f"expected a TPU topology such as v5e:2x2, or '{ANY}', got '{name}'")
    chip, shape = match.groups()
    if chip not in TPU_MEMORY:
        raise UsageError(f"unknown TPU '{chip}': {nearest(chip, TPU_MEMORY)}")
    about = f"TPU {chip} {shape}"
    return Target(
        accelerator="tpu",
        name=name,
        slices=slices,
        about=about if slices == 1 else f"{slices} slices of {about}",
        devices=slices * math.prod(map(int, shape.split("x"))),
        memory_bytes=TPU_MEMORY[chip],
    )


def gpu_file(name: str) -> Path:
    return GPUS / f"{name}.txtpb"


def _gpu(name: str) -> Target:
    known = sorted(path.stem for path in GPUS.glob("*.txtpb"))
    if name not in known:
        raise UsageError(f"unknown GPU '{name}': {nearest(name, [*known, ANY])}")
    facts = dict(_FIELD.findall(gpu_file(name).read_text("utf-8")))
    memory = int(facts["device_memory_size"])
    return Target(accelerator="cuda", name=name, about=facts["device_description_str"], memory_bytes=memory)
