"""The causes of failure: what each means and what a user can do; and signatures that group equal failures.

Silent causes are found by `matrix.truth` and `matrix.accuracy`, those of a process's end by
`matrix.failures.death`; those that an exception shows are recognised by `matrix.failures.recognise`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A kind of failure.

    Attributes:
        id: stable word, used in definitions, journals and reports.
        words: what happened, for a person.
        advice: what a user can do.
        infrastructure: whether the fault may be the machine's rather than the code's, so that a retry makes sense.
    """

    id: str
    words: str
    advice: str
    infrastructure: bool = False


_TABLE = (
    # The silent ones: the script ended well and was wrong.
    Cause("wrong-device", "The work was done on another device than the cell's.",
          "Take the device from the framework's default (torch.accelerator, jax.devices()) or from a flag, and move "
          "both the model and the batches to it."),
    Cause("idle-devices", "Devices that the cell gave did no work.",
          "Launch one process for each device (torchrun), or lay a mesh over all of jax.devices()."),
    Cause("replicated-work", "Every device did all the work instead of its share.",
          "Give each rank its own slice of the global batch (DistributedSampler, rank::world_size), or put the batch "
          "with a sharding over the data axis."),
    Cause("not-reduced", "Ranks did not combine what they computed: each trains a model of its own.",
          "Use collectives that know the device: in PyTorch/XLA the process group's backend 'xla' in processes that "
          "torch_xla.launch starts, or one process and SPMD (torch_xla.runtime.use_spmd)."),
    Cause("not-sharded", "Every device holds all the parameters instead of its share.",
          "Wrap with fully_shard or parallelize_module, or give the parameters a sharding over the mesh axis."),
    Cause("not-compiled", "Nothing, or hardly anything, was compiled although the cell is one of a compiler.",
          "Use the module or function that torch.compile returns; look at graph breaks with TORCH_LOGS=graph_breaks."),
    Cause("wrong-result", "The losses leave the float64 reference by more than the precision explains.",
          "Compare the first step that is off: its data, its loss scaling over ranks, its optimizer state."),
    Cause("not-finite", "A loss, or a value that the framework was told to check, is NaN or infinite.",
          "Lower the learning rate, clip gradients, or keep the loss and norms in float32."),
    Cause("nondeterministic", "Two runs of one source with one seed disagree.",
          "Seed every generator that is used, and fix the order of data and reductions."),
    Cause("no-progress", "The script ended without one progress line.",
          "Print 'step=N loss=X' as it trains, or describe its lines with 'progress:' in workload.yaml."),
    Cause("incomplete", "The script ended cleanly before it had reported everything that was asked of it.",
          "Look for an early return, a data set that ran out, or a swallowed exception."),
    # What an exception shows.
    Cause("missing-package", "The script imports a package that its interpreter does not have.",
          "Install it in the environment of this backend, or make the import optional in the script."),
    Cause("broken-install", "A framework is installed but does not come up: its parts, its driver or this device do "
          "not fit its build.",
          "Import it by hand in that environment; reinstall it in versions that fit each other, the driver and the "
          "device."),
    Cause("missing-device", "The script asks for a device, or a number of devices, that its framework does not see.",
          "Ask for the device that is there (torch.accelerator, jax.devices()); if the machine has the device, install "
          "the build of the framework, and the driver, that can see it."),
    Cause("unsupported-op", "An operation has no implementation for this device.",
          "Replace it, decompose it, or do it on the host."),
    Cause("unsupported-dtype", "An operation does not take this data type, or these data types together, on this "
          "device.",
          "Cast before it, or choose another precision for this device."),
    Cause("device-mismatch", "Tensors of one operation are on different devices.",
          "Move every tensor with the model, also those made inside forward, and register buffers."),
    Cause("type", "A call was given a kind of value, or an argument, that it does not take.",
          "Look at the line: None, a list or another framework's array where a tensor was expected, or an argument "
          "that this version of the function does not have."),
    Cause("shape", "Shapes of an operation do not fit.",
          "Look at the line, and at what depends on the number of devices: the batch, the mesh, the last batch."),
    Cause("removed-api", "The installed version of a library does not have what the script uses of it.",
          "Use its successor, or install the version that the script was written for."),
    Cause("compile-error", "The compiler refused the program, or its tool chain failed.",
          "Look at the operation or the value it names; for torch.compile try fullgraph=False or take the function "
          "out of it, for jax.jit make the value static or use jax.lax.cond."),
    Cause("damaged-cache", "A compiler's cache holds a file that was never finished, since what wrote it was killed.",
          "Remove the file that the message names: it is built again. Then run the cell again.", True),
    Cause("out-of-memory-device", "The device had not enough memory.",
          "Use a smaller batch or lower precision, recompute activations, or shard the parameters."),
    Cause("out-of-memory-host", "The host had not enough memory.",
          "Use fewer or smaller processes, a smaller batch, or a machine with more memory (and shared memory, for the "
          "workers of data loaders)."),
    # What happens between processes.
    Cause("rendezvous", "The processes did not find each other.",
          "Check MASTER_ADDR, MASTER_PORT, the number of processes, and name resolution between the hosts.", True),
    Cause("collective-mismatch", "Ranks did not make the same collective calls: another one, another shape or type, "
          "or none.",
          "Make every rank take the same path through the script; TORCH_DISTRIBUTED_DEBUG=DETAIL names the calls."),
    Cause("rank-died", "A process was killed from outside.",
          "Look at its log and at what kills processes on its host: the kernel when memory runs out, a job's limit, "
          "a person."),
    Cause("network", "A connection was refused, reset, timed out, or its host's name not resolved.",
          "Check the address, and that the cell may reach it; put what the script downloads beside it.", True),
    # How a process ends.
    Cause("hang", "Nothing was reported for longer than allowed, and the processes were still alive.",
          "Look at the stacks: the rank that stands elsewhere than the others is the one to ask. If it was only slow, "
          "raise 'no_progress'."),
    Cause("timeout", "The attempt made progress but did not end within its time limit.",
          "Raise 'timeout', or run fewer steps."),
    Cause("crash", "A process was ended by the system: segmentation fault, abort, illegal instruction.",
          "The stack names the library that was called; check that its version fits the others and the driver."),
    Cause("exit", "The script ended itself with an exit code other than 0.",
          "Look at the line that exits, and at the end of the log; an argument that the script does not know ends it "
          "with 2."),
    Cause("exception", "The script raised an exception of no kind that is recognised.",
          "Read the traceback."),
)  # fmt: skip

CAUSES: Mapping[str, Cause] = {cause.id: cause for cause in _TABLE}


MAX_SIGNED = 2_000  # characters of a message that tell it from others
_NORMALISE = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x"),
    (re.compile(r"(?<![\w.])(?:/[\w.+@~-]+)+/"), ""),  # the folders of a path; its last part stays
    (re.compile(r"(?<!\w)(?=[a-f]*\d)[0-9a-f]{8,}(?!\w)"), "#"),
    (re.compile(r"(?<![A-Za-z_])\d+(?:x\d+)+"), "#"),  # 32x64; the digits of conv2d or float16 stay
    (re.compile(r"(?<![A-Za-z_\d])\d+(?:\.\d+)?(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"#(?:, ?#)+"), "#"),  # a shape, whatever its rank
    (re.compile(r"\s+"), " "),
)


def signature(cause: str, message: str, frame: str | None) -> str:
    """A short digest that is equal for equal failures: cause, message without its numbers and folders, user's line."""
    message = message[:MAX_SIGNED]
    for pattern, replacement in _NORMALISE:
        message = pattern.sub(replacement, message)
    text = "\n".join((cause, message.strip(), frame or ""))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
