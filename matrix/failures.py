"""The causes of failure: how each is recognised, what it means, and what a user can do; and signatures that group them.

Silent causes are found by `matrix.truth` and `matrix.accuracy`, causes of a process's death by `matrix.outcome`;
causes that an exception shows are recognised here, by the exception's type and message.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


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
    Cause("not-sharded", "Every device holds all the parameters instead of its share.",
          "Wrap with fully_shard or parallelize_module, or give the parameters a sharding over the mesh axis."),
    Cause("not-compiled", "Nothing, or hardly anything, was compiled although the cell is one of a compiler.",
          "Use the module or function that torch.compile returns; look at graph breaks with TORCH_LOGS=graph_breaks."),
    Cause("wrong-result", "The losses leave the float64 reference by more than the precision explains.",
          "Compare the first step that is off: its data, its loss scaling over ranks, its optimizer state."),
    Cause("not-finite", "A loss is NaN or infinite.",
          "Lower the learning rate, clip gradients, or keep the loss and norms in float32."),
    Cause("nondeterministic", "Two runs of one source with one seed disagree.",
          "Seed every generator that is used, and fix the order of data and reductions."),
    Cause("no-progress", "The script ended without one progress line.",
          "Print 'step=N loss=X' as it trains, or describe its lines with 'progress:' in workload.yaml."),
    Cause("incomplete", "The script ended cleanly before it had reported everything that was asked of it.",
          "Look for an early return, a data set that ran out, or a swallowed exception."),
    # What an exception shows.
    Cause("missing-package", "The script imports a package that its interpreter does not have.",
          "Install it in the environment of this backend, or guard the import."),
    Cause("broken-install", "The framework is installed but does not come up.",
          "Reinstall it; check that its versions, its drivers and the C++ library fit each other."),
    Cause("missing-device", "The script asks for a device that its framework does not see.",
          "Ask for the device that is there, or install the build of the framework that can see it."),
    Cause("unsupported-op", "An operator has no implementation for this device.",
          "Replace it, move it to the host, or decompose it."),
    Cause("unsupported-dtype", "An operator has no implementation for this data type on this device.",
          "Cast around it, or choose another precision for this device."),
    Cause("device-mismatch", "Tensors of one operation are on different devices.",
          "Move every tensor with the model, also those made inside forward, and buffers that are not registered."),
    Cause("type", "A value has a type that the operation does not take.",
          "Look at the frame: a Python number, a NumPy array or a tensor of another framework where one was expected."),
    Cause("shape", "Shapes of an operation do not fit.",
          "Look at the frame, and at what depends on the number of devices: the batch, the mesh, the last batch."),
    Cause("removed-api", "A name is gone from the installed version of the framework.",
          "Use its successor, or pin the version."),
    Cause("compile-error", "The compiler refused the program.",
          "Look at the operation it names; for torch.compile try fullgraph=False or take the function out of it."),
    Cause("out-of-memory-host", "The host had not enough memory.",
          "Use fewer or smaller processes, a smaller batch, or a machine with more memory."),
    # What happens between processes.
    Cause("rendezvous", "The processes did not find each other.",
          "Check MASTER_ADDR, the port, the number of processes, and name resolution between the hosts.", True),
    Cause("collective-mismatch", "Ranks called different collectives, or with different shapes or types.",
          "Make every rank take the same path; TORCH_DISTRIBUTED_DEBUG=DETAIL names the call."),
    Cause("rank-died", "A rank was killed from outside.",
          "Look at that rank's log and at what kills processes on its host (out of memory, a job limit)."),
    Cause("network", "A connection was refused, reset, or not resolved.",
          "Check that the address is right and can be reached from the cell.", True),
    # How a process ends.
    Cause("hang", "Nothing was reported for longer than allowed, and the processes were still alive.",
          "Look at the stacks: the rank that stands elsewhere than the others is the one to ask."),
    Cause("timeout", "The attempt made progress but did not end within its time limit.",
          "Raise 'timeout', or run fewer steps."),
    Cause("crash", "A process was ended by the system: segmentation fault, abort, illegal instruction.",
          "The native stack in its log names the library; check versions and drivers."),
    Cause("exit", "The script ended with an exit code other than 0, without an exception.",
          "Look for sys.exit in the frame, and at the last lines of the log."),
    Cause("exception", "The script raised an exception.",
          "Read the traceback; it is not one of the kinds that are recognised."),
)  # fmt: skip

CAUSES: Mapping[str, Cause] = {cause.id: cause for cause in _TABLE}


@dataclass(frozen=True)
class _Rule:
    """A pattern over `TypeName: message`, where the type may be any class in the exception's ancestry."""

    cause: str
    type: str
    message: str = ""

    def fits(self, link: Mapping[str, Any]) -> bool:
        names = [link["type"], *link.get("bases", ())]
        return any(re.fullmatch(self.type, name) for name in names) and bool(
            re.search(self.message, link["message"], re.IGNORECASE | re.DOTALL)
        )


_ANY = r".*"
_FRAMEWORK = r"(?:torch|torchvision|torchaudio|jax|jaxlib|flax|optax|equinox)"
_RULES = (
    _Rule("removed-api", "AttributeError", rf"module '{_FRAMEWORK}[\w.]*' has no attribute"),
    _Rule("removed-api", "AttributeError", rf"{_FRAMEWORK}[\w.]* (?:was|is|has been) (?:deprecated|removed)"),
    _Rule("removed-api", "ImportError", rf"cannot import name '\w+' from '{_FRAMEWORK}"),
    _Rule("removed-api", "ModuleNotFoundError", rf"No module named '{_FRAMEWORK}\."),
    _Rule("removed-api", "RuntimeError|NotImplementedError|DeprecationWarning",
          r"(?:is|was|has been) deprecated .{0,120}(?:and (?:is|was|has been|will be) removed|removed from)|"
          r"has been removed (?:from|in|since)|is no longer supported|no longer exists"),
    _Rule("broken-install", "ImportError", r"cannot open shared object file|undefined symbol|version `[\w.]+' not found|"
          r"DLL load failed|partially initialized module|requires jaxlib to be installed"),
    _Rule("broken-install", "OSError", r"cannot open shared object file|undefined symbol"),
    _Rule("broken-install", "ModuleNotFoundError", r"requires jaxlib"),
    _Rule("broken-install", "RuntimeError", r"jaxlib (?:version|is version).{0,80}(?:incompatible|older|newer|requires)|"
          r"operator torch\w+::\w+ does not exist|Numpy is not available"),
    _Rule("missing-package", "ModuleNotFoundError|ImportError", r"No module named|is not installed|please install"),
    _Rule("missing-device", _ANY,
          r"not compiled with (?:CUDA|HIP|ROCm|XPU|MPS) enabled|no (?:NVIDIA|CUDA|HIP|ROCm) (?:driver|GPUs?|devices?)|"
          r"Found no NVIDIA driver|No CUDA GPUs are available|invalid device ordinal|CUDA driver version is insufficient|"
          r"Attempting to deserialize object on a CUDA device|Unknown backend:? '?\w+|Backend '\w+' failed to initialize|"
          r"Unable to initialize backend|no (?:\w+ )?(?:devices|platforms?).{0,60}(?:found|present|available)|"
          r"is not in the list of known backends|Cannot access accelerator device when none is available|"
          r"only \d+ devices? (?:is|are) (?:available|visible)|has no device \d+|"
          r"requires? (?:at least )?\d+ devices?,? but (?:only )?\d+|"
          r"Number of devices \d+ must be >= the product of mesh_shape|"
          r"Expected one of cpu, cuda.{0,300}device type at start of device string|PyTorch is not linked with support for"),
    _Rule("device-mismatch", _ANY,
          r"Expected all tensors to be on the same device|found at least two devices|incompatible devices for|"
          r"tensors? (?:is|are) on (?:different|cpu|cuda).{0,60}(?:but|expected)|must be on the same device|"
          r"Unhandled FakeTensor Device Propagation|is on \S+ device, expected|"
          r"Input type \(.*\) and weight type \((?!.*same).*(?:cuda|cpu)|Passed CPU tensor to|"
          r"can't convert \S+ device type tensor to numpy|Trying to convert a tensor.{0,40}device"),
    _Rule("out-of-memory-host", "MemoryError"),
    _Rule("out-of-memory-host", _ANY,
          r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory|Cannot allocate memory|std::bad_alloc|"
          r"Out of memory allocating \d+ bytes(?!.*(?:gpu|tpu|hbm))|Unable to allocate [\d.]+ \w+ for an array"),
    _Rule("collective-mismatch", _ANY,
          r"Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes|Collective .{0,80}mismatch|"
          r"collectives? (?:calls? )?(?:do(?:es)? not|don't) match|invalid tensor (?:size|type) at index|"
          r"tensors must (?:be of|have) (?:the )?same (?:size|shape|type)|incompatible tensor type"),
    _Rule("rendezvous", _ANY,
          r"rendezvous|DistStoreError|Timed out (?:after|waiting).{0,80}(?:clients|store|ranks|workers)|"
          r"client socket has (?:timed out|failed to connect)|The server socket has failed to listen|EADDRINUSE|"
          r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected|"
          r"wait timeout after \d+ ?ms|coordination service.{0,80}(?:barrier|timeout|deadline)|"
          r"Barrier timed out|DEADLINE_EXCEEDED.{0,120}(?:barrier|coordinat|register)"),
    _Rule("network", "ConnectionError|socket\\.gaierror|urllib\\.error\\.URLError|TimeoutError|ssl\\.SSLError"),
    _Rule("network", _ANY, r"Connection (?:refused|reset|closed) by peer|Name or service not known|"
          r"Temporary failure in name resolution|Network is unreachable|No route to host|Connection refused"),
    _Rule("unsupported-dtype", _ANY,
          r"not implemented for '\w+'|Unsupported (?:data ?type|dtype)|dtype .{0,40}(?:is )?(?:not|un)supported|"
          r"expected scalar type|must have the same dtype|should be the same type|expected .{0,40} to have dtype|"
          r"only supports? (?:float|double|complex|integer|int|half|bfloat).{0,60}(?:type|dtype|tensors?)|"
          r"(?:requires|accepts?) dtypes? |Only Tensors of floating point|does not accept dtype|"
          r"(?:float|int|bool|bf|complex)\w* (?:is|are) not supported|Low precision dtypes not supported"),
    _Rule("unsupported-op", _ANY,
          r"Could not run 'aten::|not (?:currently )?implemented for the '?\w+'? (?:device|backend)|"
          r"translation rule .{0,120} not found for platform|is not (?:currently )?(?:implemented|supported) (?:for|on) "
          r"(?:the )?(?:platform|device|backend|cpu|cuda|gpu|tpu|rocm|hip|mps|xla)|not implemented on (?:cpu|gpu|tpu)|"
          r"only implemented (?:for|on) (?:the )?(?:cpu|gpu|cuda|tpu)|No registered|UNIMPLEMENTED|"
          r"Only interpret mode is supported on \w+ backend|not supported by the current backend"),
    _Rule("shape", _ANY,
          r"shapes? (?:\S+ )?(?:cannot be multiplied|.{0,60}is invalid for input|mismatch|must|not aligned)|mat1 and mat2|"
          r"size of tensor \w+ \(\d+\) must match|size mismatch|incompatible shapes|not broadcastable|"
          r"Sizes of tensors must match|got incompatible shapes|shape .{0,60}(?:does not|doesn't) match|"
          r"Cannot reshape|invalid shape|cannot reshape|dot_general requires contracting dimensions|"
          r"(?:should|must) be divisible by|not (?:evenly )?divisible by|Expected input batch_size|"
          r"Dimension out of range|could not be broadcast|expected input.{0,60}to have \d+ channels|"
          r"target.{0,60}size.{0,60}must|concatenat\w+.{0,60}shapes|broadcast.{0,40}shapes"),
    _Rule("compile-error", r"torch\._dynamo\..*|torch\._inductor\..*|torch\.fx\..*|triton\..*"),
    _Rule("compile-error", r"jax\.errors\..*|jax\._src\.errors\..*"),
    _Rule("compile-error", _ANY, r"during compilation|Compilation failure|compilation failed|CppCompileError|"
          r"InvalidCxxCompiler|XLA compilation|HloModule|LoweringException|INTERNAL: .{0,80}(?:LLVM|compil)"),
    _Rule("type", "TypeError"),
)  # fmt: skip


def recognise(chain: Sequence[Mapping[str, Any]]) -> str:
    """The cause that an exception shows.

    Args:
        chain: the exception and what it was raised from, outermost first; each with `type`, `bases`, `message`.
    """
    for link in chain:
        for rule in _RULES:
            if rule.fits(link):
                return rule.cause
    return "exception"


def user_frame(chain: Sequence[Mapping[str, Any]], root: str) -> tuple[str, int] | None:
    """File and line of the innermost frame that lies below `root`, of the outermost exception that has one."""
    for link in chain:
        for frame in reversed(link["frames"]):
            if PurePath(frame["file"]).is_relative_to(root):
                return frame["file"], frame["line"]
    return None


_NORMALISE = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x"),
    (re.compile(r"(?:/[\w.+@~ -]+)+/"), ""),
    (re.compile(r"\b[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def signature(cause: str, message: str, frame: str | None) -> str:
    """A short digest that is equal for equal failures: cause, message without its numbers and paths, user's frame."""
    for pattern, replacement in _NORMALISE:
        message = pattern.sub(replacement, message)
    place = frame.rsplit("/", 1)[-1] if frame else ""
    return hashlib.sha256("\n".join((cause, message.strip()[:500], place)).encode("utf-8", "replace")).hexdigest()[:12]
