"""What exceptions say, and the cause that it shows: the tables that `recognise` goes through.

Who speaks decides what words mean: from torch "shape mismatch" is about tensors, from a script it can be about
anything. So the wordings stand in tables by speaker:

    BY_TYPE        the exception's own class tells, whoever raised it
    BY_FRAMEWORK   said by a framework: by its class, its code, or C code that the innermost line called
    BY_SCRIPT      said by a `raise` or `assert` of the script or of any other library: only what is unmistakable
    WRAPPERS       classes that a compiler puts around whatever happened while it worked: looked at last

In each table the first rule that fits counts, so what is narrow stands before what is wide. The wordings are those of
torch 2.13, JAX 0.10 and NumPy 2.4, also for devices that their authors had and these tests have not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

FRAMEWORKS = frozenset(
    [
        "torch",
        "torchvision",
        "torchaudio",
        "torch_xla",
        "functorch",
        "triton",
        "accelerate",
        "lightning",
        "pytorch_lightning",
        "deepspeed",
        "timm",
        "transformers",
        "diffusers",
        "einops",
        "numpy",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "equinox",
        "jaxtyping",
        "orbax",
        "chex",
        "ml_dtypes",
        "opt_einsum",
    ]
)
"""Top-level modules whose words are about tensors, devices and collectives."""
_FRAMEWORK = "(?:" + "|".join(sorted(FRAMEWORKS)) + ")"


@dataclass(frozen=True)
class Rule:
    """A cause, by the class and the wording of an exception.

    Attributes:
        cause: id of the cause.
        types: regex for the whole name of its class or of a base.
        wordings: regexes, of which one is found anywhere in the message, in any case; none: any message.
    """

    cause: str
    types: str
    wordings: tuple[str, ...]

    def fits(self, names: Iterable[str], message: str) -> bool:
        return any(map(_compiled(self.types).fullmatch, names)) and bool(
            _compiled("|".join(self.wordings), re.IGNORECASE | re.DOTALL).search(message)
        )


@functools.cache
def _compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(pattern, flags)


def _rule(cause: str, *wordings: str, types: str | None = None) -> Rule:
    return Rule(cause, types or _USUAL, wordings)


# What frameworks raise. OSError and KeyError are not among them: a file may be named anything.
_USUAL = (
    r"RuntimeError|ValueError|TypeError|NotImplementedError|AssertionError|IndexError|AttributeError|SystemError|"
    rf"MemoryError|{_FRAMEWORK}\..*|launcher"
)
_IMPORT = r"ImportError"
CACHED = r"(?P<cached>/[^\n]*/(?P<digest>[a-z2-7]{2})/c(?P=digest)[a-z2-7]{49}(?:\.main)?\.so)"
"""A library in Inductor's cache, by its name: a digest of its source, in a folder by the digest's beginning."""
_UNFINISHED = r"(?:file too short|cannot read file data|invalid ELF header|ELF load command|object file has no)"
_GPU = r"(?:CUDA|HIP|ROCm|XPU|MPS)"
_DEVICE = r"(?:CUDA|GPU|TPU|ROCm|NVIDIA|accelerator)"
_TRACERS = (
    r"(?:jax\.errors|jax\._src\.errors)\."
    r"(?:ConcretizationTypeError|Tracer\w+|NonConcrete\w+|UnexpectedTracerError)"
)  # all that says: a value is not known while the program is traced

BY_TYPE = (
    _rule("crash", types=r"concurrent\.futures\.process\.BrokenProcessPool"),
    _rule("missing-package", r"No module named '(?!torch\.|jax\.|numpy\.)", types=_IMPORT),
    _rule("out-of-memory-device", types=r"torch(?:\.cuda)?\.OutOfMemoryError"),
    _rule("out-of-memory-host", types=r"MemoryError"),
    _rule("collective-mismatch", r"Detected mismatch between collectives", types=r".*"),
    _rule("rendezvous", types=r"torch\.distributed\.elastic\.rendezvous\..*"),
    _rule(
        "network",
        types=r"socket\.gaierror|socket\.herror|ssl\.SSL\w*|http\.client\.RemoteDisconnected|"
        r"(?:requests\.exceptions|urllib3\.exceptions|httpx|httpcore)\."
        r"(?:\w*Connect\w*|\w*Timeout\w*|ProxyError|ProtocolError|NameResolutionError|MaxRetryError)",
    ),
    _rule("network", r"timed out|errno|urlopen error", r"^$", types=r"urllib\.error\.URLError"),
    _rule("not-finite", types=r"FloatingPointError"),
    _rule(
        "damaged-cache",
        rf"ImportError: {CACHED}: {_UNFINISHED}",
        types=r"torch\._(?:inductor|dynamo)\.exc\..*",
    ),
    _rule("damaged-cache", rf"^{CACHED}: {_UNFINISHED}", types=_IMPORT),  # it loads a backward pass without a wrapper
    _rule("compile-error", types=_TRACERS),
    _rule(
        "compile-error",
        types=r"torch\._dynamo\.exc\.(?:Unsupported|UserError|RecompileError|FailOnRecompile\w*)|"
        r"torch\._inductor\.exc\.\w*(?:Cpp|CUDA|Cxx)\w*|triton\.(?:compiler|runtime)\.\w*\.?(?:CompilationError|PTXASError)|"
        r"torch\.jit\.frontend\.\w+",
    ),
)

BY_FRAMEWORK = (
    # memory
    _rule(
        "out-of-memory-device",
        rf"{_GPU}(?: backend)? out of memory",
        rf"{_GPU} error: out of memory",
        r"hipErrorOutOfMemory",
        r"(?:CUBLAS|CUDNN|HIPBLAS|rocblas|MIOPEN)_STATUS_ALLOC_FAILED",
        r"memory space hbm",
        r"\bhbm\b.{0,80}exceed",
        r"RESOURCE_EXHAUSTED: .{0,40}(?:while trying to allocate|Failed to allocate request|GPU|TPU|HBM)",
        r"RESOURCE_EXHAUSTED: (?:XLA:TPU|Attempting to (?:reserve|allocate))",
        r"CUDA_ERROR_OUT_OF_MEMORY",
    ),
    _rule(
        "out-of-memory-host",
        r"DefaultCPUAllocator: ",
        r"std::bad_alloc",
        r"Unable to allocate .{0,40}for an array",
        r"RESOURCE_EXHAUSTED: Out of memory allocating",
        r"workers are out of shared memory",
        r"Cannot allocate memory",
        r"killed by signal: Bus error",
        r"unable to (?:mmap|open|write to|allocate) .{0,60}(?:shared memory|/torch_)",
        types=rf"OSError|{_USUAL}",
    ),
    # what is installed
    _rule(
        "missing-device", r"No module named 'torch\.(?:hpu|npu|mlu|musa|xpu|mtia|maia|privateuseone)'", types=_IMPORT
    ),
    _rule(
        "broken-install",
        r"cannot open shared object file",
        r"undefined symbol",
        r"version `[^']+' not found",
        r"DLL load failed",
        rf"partially initialized module '{_FRAMEWORK}\b",
        r"requires jaxlib",
        r"compiled using NumPy",
        r"numpy\.core\.multiarray failed",
        r"invalid ELF header",
        r"file too short",
        r"failed to map segment",
        r"Could not load this library",
        types=r"ImportError|OSError",
    ),
    _rule(
        "broken-install",
        r"jaxlib (?:version|is version)",
        r"operator torch\w+::\w+ does not exist",
        r"Numpy is not available",
        r"no kernel image is available",
        r"hipErrorNoBinaryForGpu",
        r"code object for all current devices",
        r"NVIDIA driver on your system is too old",
        r"unsupported display driver",
        r"DNN library initialization failed",
        r"(?:CUDNN|CUBLAS|CUSOLVER|HIPBLAS|ROCBLAS)_STATUS_(?:NOT_INITIALIZED|ARCH_MISMATCH)",
        r"Unable to load cuDNN",
        r"Outdated (?:cuDNN|cuBLAS|CUDA)",
        r"Loaded runtime CuDNN",
        r"cuDNN version incompatibility",
        r"PJRT.{0,40}version",
        r"libdevice (?:not found|is required)",
        r"torch.{0,40}were compiled with different CUDA",
    ),
    _rule(
        "removed-api",
        rf"cannot import name '\w+' from '{_FRAMEWORK}\b",
        rf"No module named '{_FRAMEWORK}\.",
        types=_IMPORT,
    ),
    # devices
    _rule(
        "missing-device",
        r"not compiled with \w+ enabled",
        r"compiled without CUDA support",
        r"driver version is insufficient",  # what CUDA says also where there is no driver at all
        r"Found no NVIDIA driver",
        r"No (?:CUDA|HIP|XPU|NVIDIA|ROCm) (?:GPUs?|devices?) (?:are|is|were) (?:available|found|detected)",
        rf"{_GPU}(?:-capable)? (?:error: )?(?:invalid device ordinal|no \S+-capable device)",
        r"invalid device ordinal",
        r"no (?:CUDA|ROCm|HIP)-capable device",
        r"(?:CUDA|HIP) driver initialization failed",
        r"CUDA unknown error",
        r"hipErrorNoDevice",
        r"CUDA_ERROR_NO_DEVICE",
        r"busy or unavailable",
        r"TPU is already in use",
        r"Attempting to deserialize object on (?:a )?\w+ device",
        r"device type at start of device string",
        r"Invalid device string",
        r"invalid device index",
        r"Device index must",
        r"Could not run 'aten::empty\S*' with arguments from the "
        r"'(?:CUDA|HIP|XPU|MPS|XLA|HPU|IPU|VE|MTIA|MAIA|Vulkan|PrivateUse1)'",
        r"PyTorch is not linked with support for",
        r"MPS backend is supported on MacOS",
        r"Cannot access accelerator device when none is available",
        r"module 'torch\._C' has no attribute '_(?:cuda|xpu|mps)",
        r"instantiate dummy base class (?:Event|Stream|CUDAGraph|_?Cuda\w*|Xpu\w*|\w*Graph)",
        r"without ATen_\w+ library",
        r"requires CUDA support",
        r"doesn't have (?:NCCL|XCCL|HCCL|UCC) built in",
        r"only supported with GPUs, no GPUs",
        # JAX
        r"Unknown backend",
        r"Backend '\w+' (?:failed to initialize|provides no devices|is not in the list)",
        r"Unable to initialize backend",
        r"is not in the list of known backends",
        r"Could not initialize backend",
        r"no supported devices found",
        r"No visible (?:GPU|TPU) devices",
        r"TPU initialization failed",
        r"Number of devices \d+ must (?:be >=|equal) the product",
        r"requires \d+ (?:logical devices|replicas)",
        r"only \d+ (?:XLA )?devices? (?:is|are) (?:available|visible)",
        r"platforms? that are instances of",
    ),
    _rule(
        "device-mismatch",
        r"(?:on|to have|at|in) (?:the |a )?same devices?\b",
        r"different devices?\b",
        r"at least two devices",
        r"same device type",
        r"not on the expected device",
        r"incompatible devices for",
        r"is on \S+ device, expected",
        r"FakeTensor Device Propagation",
        r"Passed CPU tensor to",
        r"can't convert \S+ device type tensor to numpy",
        r"only dense CPU tensors can be pinned",
        r"should be a 1D CPU int64 tensor",
        r"Input type \(torch\.(?:cuda|xla|mps|xpu|hip)\.\w+\) and \w+ type \(torch\.(?!cuda|xla|mps|xpu|hip)",
        r"Input type \(torch\.(?!cuda|xla|mps|xpu|hip)\w+\) and \w+ type \(torch\.(?:cuda|xla|mps|xpu|hip)\.",
        r"expected (?:'\w+' to be (?:a )?)?CPU tensor, but got",
        r"to be on GPU \(while checking",
        r"Expected a '\w+' (?:device type for )?generator",
        r"a generator of device",
        r"No backend type associated with device",
        r"Tensors must be CUDA and dense",
        r"on device \S+ \(device_ids\[0\]\) but found one of them on device",
        r"out of meta tensor",
        r"on meta tensors",
        r"cannot be accessed from Triton",
        r"same type of devices",
        r"indices should be either on \S+ or on the same",
    ),
    # between processes
    _rule(
        "collective-mismatch",
        r"Detected mismatch between collectives",
        r"op\.preamble\.length <= op\.nbytes",
        r"monitoredBarrier",
        r"same model across all ranks",
        r"appears not to match (?:sizes|strides|dtype) of the same param",
        r"invalid tensor (?:size|type) at index",
        r"Watchdog caught collective operation timeout",
        r"threads to join the rendezvous, but",
        r"operations have failed or timed out",
        r"timed out waiting \d+ ?ms for (?:send|recv) operation",
        r"Application timeout caused pair closure",
        r"collective operation timed out",
    ),
    _rule(
        "rendezvous",
        r"rendezvous",
        r"waiting for clients",
        r"clients joined",
        r"client socket has (?:timed out|failed)",
        r"server socket has failed to listen",
        r"EADDRINUSE",
        r"wait timeout after \d+ ?ms",
        r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected",
        r"store->get\('\d+'\) got error",
        r"coordinator_address should be defined",
        r"Number of processes must be defined",
        r"process id of the current process must be defined",
        r"DEADLINE_EXCEEDED.{0,400}(?:barrier|coordinat|connect)",
        r"coordination service",
        r"JAX distributed service detected fatal errors",
        r"Barrier timed out",
        r"RegisterTask",
        types=rf".*DistNetworkError|.*DistStoreError|{_USUAL}",
    ),
    _rule(
        "network",
        r"Connection (?:refused|reset|closed)",
        r"Name or service not known",
        r"Network is unreachable",
        r"Temporary failure in name resolution",
        r"No route to host",
        r"Broken pipe",
        r"Connection was aborted",
        r"couldn't connect to 'https?:",
        r"locate the (?:file|files) on the Hub",
        types=rf"OSError|{_USUAL}",
    ),
    # values
    _rule(
        "removed-api",
        r"now removed",
        r"(?:has|have) been (?:deprecated|removed)",
        r"(?:was|were) (?:deprecated|removed)",
        types=r"AttributeError|ImportError",
    ),
    _rule(
        "removed-api",
        rf"module '{_FRAMEWORK}(?:\.\S*)?' has no attribute",
        r"'(?:torch\.)?(?:Tensor|Parameter|jaxlib\._jax\.ArrayImpl|ArrayImpl|\w*Tracer)' object has no attribute",
        r"'_OpNamespace' '\w+' object has no attribute",
        r"Unrecognized config option",
        types=r"AttributeError",
    ),
    _rule(
        "removed-api",
        r"deprecated.{0,120}\bremoved\b",
        r"has been removed (?:from|in|since)",
        r"no longer (?:supported|exists)",
        r"is deprecated\. Please use new-style",
        r"requires the return_complex parameter",
    ),
    _rule("shape", r"so the shapes do not match", r"loading state_dict.*size mismatch"),
    _rule(
        "unsupported-dtype",
        r"not implemented for '\w+'",
        r"Unsupported (?:data ?type|dtype|element type|ScalarType)",
        r"unsupported type: ",
        r"dtypes? \S{1,40} (?:is|are) (?:not|un)supported",
        r"expected (?:scalar type|dtype)",
        r"following scalar types",
        r"same dtypes?\b",
        r"Input type \(.*\) and \w+ type \(.*\) should be the same",
        r"expected .{0,40} to have dtype",
        r"expected target dtype",
        r"could not infer output dtype",
        r"only tensors of floating point",
        r"Low precision dtypes",
        r"bool tensors? is not supported",
        r"tensors used as indices must be",
        r"(?:condition|mask) to be a bool",
        r"can't be cast to",
        r"does not (?:match weight|accept) dtype",
        r"only supported types are",
        r"does(?:n't| not) (?:have )?support (?:for )?(?:that dtype|complex|bool|float|half|bfloat|int)",
        r"only implemented on (?:integer|float|bool)",
        r"only supports? (?:float|double|complex|integer|int|half|bfloat|floating)",
        r"no available implicit dtype promotion",
        r"requires (?:real|complex|integer|float)\S*[ -].{0,40}(?:dtype|valued)",
        r"data type '\w+' not understood",
        r"(?:float|int|bool|bf|complex)\w* (?:is|are) not supported",
        r"precision '\w+' is not supported",
        r"X64 element types",
        r"support bfloat16",
        r"must (?:be|have) (?:a )?(?:floating|integ|float|complex)\w*(?: point)? d?type",
        r"Invalid scaling configuration",
        r"so the dtypes do not match",
        r"Indexer must have integer",
    ),
    _rule(
        "unsupported-op",
        r"Could not run '\w+::",
        r"not (?:currently )?implemented (?:for|on) (?:the )?\S{1,20} ?(?:device|backend|platform)?$",
        r"not (?:currently )?(?:implemented|supported) (?:for|on|by) (?:the )?(?:current )?"
        r"(?:platform|device|backend|CPU|CUDA|GPU|TPU|ROCm|HIP|MPS|XLA|XPU|\w+ (?:device|backend|platform))",
        r"not found for platform",
        r"only (?:implemented|supported|available) (?:for|on|in|with) (?:the )?"
        r"(?:CPU|GPU|CUDA|TPU|ROCm|NVIDIA|Ampere)",
        r"No registered implementation",
        r"UNIMPLEMENTED",
        r"No FFI handler registered",
        r"Only interpret mode is supported",
        r"cuDNN is not detected",
        r"No available kernel",
        r"only supports Ampere",
        r"does not have a deterministic implementation",
        r"unimplemented primitive",
        r"There was no kernel",
        r"STATUS_NOT_SUPPORTED",
    ),
    _rule("compile-error", r"JitTracer", r"Traced<", r"\bTracer\b", r"Slice entries must be static"),
    _rule(
        "shape",
        r"shapes? .{0,80}(?:cannot be|is invalid|mismatch|not aligned|incompatible|differ)",
        r"shapes? .{0,80}(?:do(?:es)? not|doesn't) match",
        r"incompatible shapes?",
        r"same shapes?\b",
        r"Incompatible types for broadcasting",
        r"invalid shape",
        r"inhomogeneous shape",
        r"(?:different|mismatch\w*|equal|unequal|inconsistent) (?:\w+ )?(?:shapes?|sizes?|lengths?|numbers? of dim)",
        r"size mismatch",
        r"sizes? .{0,60}(?:must|should|does not|doesn't|do not|to be|has to) (?:match|be equal|equal|multiply|\[)",
        r"must match the (?:existing )?size",
        r"same (?:size|sizes|length|number of (?:elements|dimensions|entries))\b",
        r"(?:could|does|can)(?: ?not|n't) (?:be )?broadcast",
        r"not broadcastable",
        r"cannot reshape",
        r"reduction dim",
        r"(?:must|should) be (?:evenly )?divisible",
        r"not (?:evenly )?divisible by",
        r"equal division",
        r"not evenly divide",
        r"split_sizes",
        r"input batch_size",
        r"Dimension out of range",
        r"out of bounds for array of dimension",
        r"\d+ channels, but got",
        r"must be a \dD",
        r"expected \S{0,8}\d-?D\b",
        r"to be \d-D",
        r"more than 1 value per channel",
        r"normalized_shape",
        r"Output size is too small",
        r"must be equal to input_size",
        r"square matri",
        r"number of dimensions",
        r"target size .{0,60}different to the input size",
        r"core dimension",
        r"first two dimensions of",
        r"multiply up to the size",
        r"Incorrect output shape",
        r"size of label",
        r"contracting dimensions",
        r"concatenation axis",
        r"squeeze out",
        r"feature dimension",
        r"scalar-output functions",
        r"leading axis sizes",
        r"inconsistent sizes?",
        r"Padding (?:length|size) should",
        r"maximum size for tensor at dimension",
        r"sequence of length \d+ at dim",
        r"Sizes of tensors must match",
        r"must be less than or equal to operand shape",
        r"dimension sizes must either be",
        r"Mismatch in shape",
        r"rank should be at least",
        r"negative dimension",
        r"implied shape",
        r"but (?:the )?(?:global|array) (?:size|shape)",
        r"should be divisible",
        r"unsupported shape",
        r"unexpected JAX type \(e\.g\. shape",
    ),
    _rule("not-finite", r"returned nan values", r"\bnan\b.{0,30}encountered"),
    _rule(
        "compile-error",
        r"during compilation",
        r"Compilation fail",
        r"failed to compile",
        r"CppCompileError",
        r"InvalidCxxCompiler",
        r"XLA compilation",
        r"LoweringException",
        r"INTERNAL: .{0,120}(?:LLVM|compil|ptxas|Mosaic|HloModule)",
        r"ptxas (?:fatal|error)",
        r"Mosaic",
    ),
    _rule(
        "type", r"Could not infer dtype of", r"Non-hashable static arguments", r"is not a valid value for jnp\.array"
    ),
    _rule("rank-died", r"killed by signal: (?:Killed|Terminated)"),
    _rule(
        "crash",
        r"killed by signal: (?:Segmentation|Abort|Illegal|Floating)",
        r"^process \d+ terminated with signal",
    ),
)

BY_SCRIPT = (
    _rule("missing-package", types=r"ImportError"),
    _rule(
        "missing-device",
        rf"\b{_DEVICE}s?\b(?: \w+)? (?:is |are |was )?(?:not (?:available|found|detected)|unavailable|required|needed)",
        rf"\b(?:requires?|needs?) (?:a |an |at least \w+ )?{_DEVICE}",
        rf"\bno {_DEVICE}\S*(?: devices?| GPUs?)? (?:is |are |was |were )?(?:available|found|detected)",
        r"run(?:s)? (?:only )?on (?:a )?(?:CUDA|GPU|TPU)",
        types=r"RuntimeError|AssertionError|ValueError|OSError|NotImplementedError",
    ),
    _rule("not-finite", r"\bloss\b.{0,20}\b(?:nan|inf|infinite|not finite|diverged)\b", r"non-?finite (?:loss|grad)"),
    _rule("type", types=r"TypeError"),
)

ASSERTED = re.compile(
    r"assert .*(?:(?:cuda|xpu|accelerator|mps)\.is_available\(\)|(?:cuda|accelerator)\.device_count\(\)|"
    r"jax\.(?:local_)?device_count\(|jax\.default_backend\(\)|jax\.(?:local_)?devices\()"
)
"""A bare `assert torch.cuda.is_available()` says nothing but its line."""

WRAPPERS = (
    _rule("compile-error", types=r"torch\._dynamo\..*|torch\._inductor\..*|torch\.fx\..*|torch\.export\..*|triton\..*"),
    _rule("compile-error", types=r"jax\.errors\.(?!JaxRuntimeError).*|jax\._src\.pallas\..*"),
)

LOST_PEER = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|Connection was aborted|Remote process exited|"
    r"remote (?:process|peer|error)|ncclRemoteError|Failed to recv, got 0 bytes|Connection was likely closed|"
    r"(?:recvValue|sendBytes) failed|unhealthy|heartbeat|another (?:task|process) .{0,20}died|Connection refused",
    re.IGNORECASE,
)
