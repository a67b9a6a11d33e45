"""A CUDA device that is not there: what a script sees of PyTorch when its tensors on `cuda` have shapes but no memory.

Loaded by path in the cell's interpreter; standard library and torch only. `install` must come before the script.

PyTorch makes fake `cuda` tensors also without CUDA (its compiler needs them), but answers "not available" to every
question about the device. Here the answers are given, nothing is computed. The device must be called `cuda`: scripts
write that name, which PyTorch lets no registered backend take (`rename_privateuse1_backend` refuses it).

Private names used: `torch._C._ensureCUDADeviceGuardSet`, `_accelerator_getAccelerator`, `_get_accelerator`; of the
libraries `c10::impl::device_guard_impl_registry` and `at::detail::getCUDAHooks`; `torch.cuda._lazy_init`,
`_exchange_device`, `_maybe_exchange_device`, `_is_compiled`; `torch.testing._internal.distributed.fake_pg`;
`torch.utils.weakref`; `torch.nn.parallel.distributed._verify_param_shape_across_processes`. Tried with the versions in
`TRIED`.
"""

import collections
import contextlib
import ctypes
import os
import sys
import types

TRIED = ("2.13",)  # others may lack a name above, or mean something else by it


class Untraceable(BaseException):
    """What a trace cannot follow; a BaseException, since it is none that a script would catch."""


class DeviceMismatch(RuntimeError):
    """What PyTorch would refuse for the devices of its tensors, in its words; as there, a RuntimeError."""

    __module__ = "torch"


class NotConvertible(TypeError):
    """What PyTorch would refuse of a tensor that is not on the CPU; as there, a TypeError."""

    __module__ = "torch"


def untried(torch):
    """Why this PyTorch is not traced; None for a version that was tried."""
    if any(torch.__version__.startswith(f"{version}.") for version in TRIED):
        return None
    return f"not verified with torch {torch.__version__}"


def add_device(torch):
    """Let autograd take `cuda` for a device that exists and does nothing.

    PyTorch's own fake tensors need that too, but get it only in a build for CUDA: an idle guard in place of one that
    counts no devices. A build for the CPU has none to replace, so one that counts none is put in first. Backward
    passes also ask the build's "hooks" which accelerator there is, and whether it was used: yes to both.
    """
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        c10, cpu = (ctypes.CDLL(os.path.join(folder, name)) for name in ("libc10.so", "libtorch_cpu.so"))
    except OSError as error:
        raise Untraceable(f"torch {torch.__version__} cannot be given a device that does nothing: {error}") from None
    registry = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    none = function(lambda: 0)
    methods = (ctypes.c_void_p * 64)(*[none] * 64)
    stub = ctypes.c_void_p(ctypes.addressof(methods))  # an object of C++ without fields: the address of its methods
    if not registry[CUDA]:
        registry[CUDA] = ctypes.addressof(stub)
    torch._C._ensureCUDADeviceGuardSet()
    cpu._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(cpu._ZN2at6detail12getCUDAHooksEv())
    ahead = 2 * ctypes.sizeof(ctypes.c_void_p)  # what stands before the methods: offset and type
    table = (ctypes.c_void_p * 64).from_buffer_copy((ctypes.c_void_p * 64).from_address(hooks.value - ahead))
    table[2 + IS_BUILT] = table[2 + HAS_PRIMARY_CONTEXT] = function(lambda: 1)
    KEPT.append(table)
    hooks.value = ctypes.addressof(table) + ahead
    if registry[CUDA] == ctypes.addressof(stub) or str(torch._C._accelerator_getAccelerator()) != "cuda":
        raise Untraceable(f"torch {torch.__version__} cannot be given a device that does nothing")


CUDA = 1  # c10::DeviceType::CUDA
IS_BUILT, HAS_PRIMARY_CONTEXT = 2, 4  # methods of at::AcceleratorHooksInterface, after its destructors
KEPT = []  # what C++ points to


def function(python):
    """The address of a function of C that returns what a function of Python does."""
    made = ctypes.CFUNCTYPE(ctypes.c_int)(python)
    KEPT.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value


def install(torch, device, refuse):
    """Answer for a device that is not there.

    Args:
        torch: the module.
        device: what the device says of itself: `runtime` (cuda or rocm), `name`, `count`, `memory_bytes`, `capability`.
        refuse: called with a reason to end the script.
    """
    add_device(torch)
    face = answers(torch, device, refuse)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, answer in face.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, answer)
    cuda = torch.device("cuda")
    for name in ("_accelerator_getAccelerator", "_get_accelerator"):
        setattr(torch._C, name, lambda: cuda)
    own = {
        "current_accelerator": lambda check_available=False: cuda,
        "current_device_index": face["current_device"],
        "current_device_idx": face["current_device"],
        "set_device_index": face["set_device"],
        "set_device_idx": face["set_device"],
        "get_memory_info": face["mem_get_info"],
    }
    for name in dir(torch.accelerator):
        if name in own or name in face:
            setattr(torch.accelerator, name, own.get(name) or face[name])
    torch.accelerator.device_index = torch.cuda.device
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.nvtx = types.SimpleNamespace(
        range_push=nothing, range_pop=nothing, mark=nothing, range=lambda *a, **k: contextlib.nullcontext()
    )
    version = "13.0" if device["runtime"] == "cuda" else None
    torch.version.cuda, torch.version.hip = version, None if version else "7.0"
    torch.Generator = generator_class(torch)
    torch.utils.weakref = types.SimpleNamespace(getweakrefs=lambda tensor: [])  # what moves a module's parameters in
    torch.__future__.set_swap_module_params_on_conversion(True)  # place, as their `.data` does between real devices
    move_to_current(torch, face["current_device"])
    torch.Tensor.pin_memory = lambda self, device=None: pinned(torch, self)
    torch.Tensor.record_stream = nothing
    torch.compiler.set_stance("force_eager")  # a compiled model is traced as it is written
    torch.distributions.Distribution.set_default_validate_args(False)  # it looks at values
    one_device(torch, device["count"], refuse)
    numbers_for_ctc(torch)
    if torch.distributed.is_available():
        fake_process_groups(torch.distributed)


def nothing(*arguments, **named):
    return None


def answers(torch, device, refuse):
    """What `torch.cuda` says: each name of it with the function that answers."""
    now = [0]
    memory = device["memory_bytes"]
    properties = types.SimpleNamespace(
        name=device["name"],
        total_memory=memory,
        major=device["capability"][0],
        minor=device["capability"][1],
        multi_processor_count=1,
        warp_size=32 if device["runtime"] == "cuda" else 64,
        gcnArchName=device["name"],
    )

    def number(which):
        if isinstance(which, int):
            return which
        index = torch.device(which).index if which is not None else None
        return now[0] if index is None else index

    def exchange(which):
        before, now[0] = now[0], which if which >= 0 else now[0]
        return before

    def set_device(which):
        if not 0 <= number(which) < device["count"]:
            raise RuntimeError("CUDA error: invalid device ordinal")
        now[0] = number(which)

    def graph(*arguments, **named):
        refuse("CUDA graphs replay work that was done on a device, and here none is")

    face = dict.fromkeys(NO_ANSWER, nothing) | dict.fromkeys(COUNTS, lambda *a, **k: 0)
    face |= dict.fromkeys(("is_available", "is_initialized", "_is_compiled", "is_tf32_supported"), lambda: True)
    face |= dict.fromkeys(("CUDAGraph", "graph", "make_graphed_callables"), graph)
    return face | {
        "device_count": lambda: device["count"],
        "current_device": lambda: now[0],
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_name": lambda which=None: device["name"],
        "get_device_properties": lambda which=None: properties,
        "get_device_capability": lambda which=None: tuple(device["capability"]),
        "get_arch_list": lambda: ["sm_{}{}".format(*device["capability"])],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(device["count"])],
        "mem_get_info": lambda which=None: (memory, memory),
        "memory_stats": lambda which=None: collections.defaultdict(int),
        "memory_summary": lambda *a, **k: "",
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }


def move_to_current(torch, current):
    """Let `.to("cuda")` and `.cuda()` move to the current device: PyTorch's own ask the idle guard, and take 0."""
    to = torch.Tensor.to

    def indexed(where):
        if isinstance(where, (str, torch.device)) and str(where) == "cuda":
            return torch.device("cuda", current())
        return where

    def moved(self, *arguments, **named):
        return to(self, *map(indexed, arguments), **{name: indexed(value) for name, value in named.items()})

    def cuda(self, device=None, non_blocking=False, **named):
        where = torch.device("cuda" if device is None else device)
        return moved(self, where, non_blocking=non_blocking, **named)

    torch.Tensor.to, torch.Tensor.cuda = moved, cuda


NO_ANSWER = (
    "_lazy_init",
    "init",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_stream",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
)
COUNTS = (
    "initial_seed",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "utilization",
    "get_sync_debug_mode",
)


class Stream:
    """A queue of work that is never done."""

    def __init__(self, *arguments, **named):
        self.cuda_stream = 0

    def __getattr__(self, name):
        if name not in ("synchronize", "wait_event", "wait_stream", "record_event"):
            raise AttributeError(name)
        return Event if name == "record_event" else nothing

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def query(self):
        return True

    def is_capturing(self):
        return False


class Silent:
    """Does nothing, whatever it is asked."""

    def __getattr__(self, name):
        return nothing


class Event(Stream):
    """A mark in it; no time passes between two."""

    record = wait = nothing

    def elapsed_time(self, end):
        return 1.0  # in ms; scripts divide by it


def generator_class(torch):
    """Generators of random numbers that know which device they are for; drawn from on the CPU, all the same."""

    class Generator(torch._C.Generator):
        def __new__(cls, device="cpu"):
            self = super().__new__(cls)
            if torch.device(device).type == "cuda":
                ON_DEVICE[self._cdata] = self, torch.device(device)
            return self

        @property
        def device(self):
            return place_of(torch, self)

    return Generator


ON_DEVICE = {}  # by the address of what PyTorch passes on, which leaves the Python object behind


def place_of(torch, generator):
    """Which device a generator is for."""
    known = ON_DEVICE.get(generator._cdata)
    return known[1] if known else torch.device("cpu")


def numbers_for_ctc(torch):
    """Let `ctc_loss` take lengths as numbers, as it does itself with tensors that are not fake."""
    original = torch.ctc_loss

    def ctc_loss(log_probs, targets, *others):
        others = [each.tolist() if isinstance(each, torch.Tensor) else each for each in others]
        return original(log_probs, targets, *others)

    torch.ctc_loss = ctc_loss


def one_device(torch, count, refuse):
    """Let DataParallel be its module, as it is on one device."""

    def move(value):
        return value.to("cuda") if isinstance(value, torch.Tensor) else value

    def forward(self, *inputs, **named):
        if count > 1:
            refuse("DataParallel copies the model and its inputs among devices, which is not traced")
        inputs, named = sys.modules["torch.utils._pytree"].tree_map(move, (inputs, named))
        return self.module(*inputs, **named)

    torch.nn.DataParallel.forward = forward


def pinned(torch, tensor):
    """Page-locked memory: the tensor itself, if PyTorch would pin it."""
    if tensor.device.type != "cpu":
        raise NotConvertible(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor


SERVED = []  # kinds of device whose tensors the process group takes


def fake_process_groups(distributed):
    """Collectives among ranks of which only this one exists: they return at once, with the right shapes.

    A group that was asked for with NCCL serves the device only, as NCCL does.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original = distributed.init_process_group

    def init_process_group(backend=None, *arguments, **named):
        world = int(named.get("world_size") or os.environ.get("WORLD_SIZE", -1))
        if world < 1:
            return original(backend, *arguments, **named)  # which says what is missing
        rank = int(named.get("rank") or os.environ.get("RANK", 0))
        only_device = backend is not None and "gloo" not in str(backend)
        SERVED[:] = ("cuda",) if only_device else ("cpu", "cuda")
        return original(",".join(f"{each}:fake" for each in SERVED), store=FakeStore(), rank=rank, world_size=world)

    distributed.init_process_group = init_process_group
    parallel = sys.modules["torch.nn.parallel.distributed"]
    parallel._verify_param_shape_across_processes = nothing  # it compares numbers
    start = parallel.DistributedDataParallel.__init__

    def __init__(self, *arguments, **named):
        start(self, *arguments, **named)
        type(self).register_comm_hook(self, None, reduced)
        self.register_comm_hook = nothing  # one of the script's own
        self.logger = Silent()  # which would take the device's time

    def reduced(state, bucket):
        done = parallel.torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.DistributedDataParallel.__init__ = __init__


def kernel_shapes(torch):
    """For each operator for which PyTorch has no rule of shapes, a function that makes tensors like its results."""
    aten = torch.ops.aten

    def statistics(x):
        """One float32 number for each channel, as normalisation over ranks keeps them."""
        return x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))

    def gru_cell_backward(grad, workspace, has_bias):
        gates = workspace.new_empty(grad.shape[0], 3 * grad.shape[1])
        bias = (workspace.new_empty(3 * grad.shape[1]),) * 2 if has_bias else (None, None)
        return gates, torch.empty_like(gates), torch.empty_like(grad), *bias

    def reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
        wanted = (input_g, input_g, weight_g, bias_g)
        return tuple(torch.empty_like(mean) if each else None for each in wanted)

    def pack(sequences, lengths, batch_first):
        steps = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
        return sequences.new_empty(sum(steps), *sequences.shape[2:]), torch.tensor(steps)

    def ctc_loss(log_probs, targets, *others):
        length, batch, _ = log_probs.shape
        return log_probs.new_empty(batch), log_probs.new_empty(batch, length, 2 * targets.shape[-1] + 1)

    shapes = {
        "_use_cudnn_ctc_loss": lambda *others: False,
        "_use_miopen_ctc_loss": lambda *others: False,
        "_ctc_loss": ctc_loss,
        "_ctc_loss_backward": lambda grad, log_probs, *others: torch.empty_like(log_probs),
        "_pack_padded_sequence": pack,
        "_thnn_fused_gru_cell": lambda gates, hidden, hx, *biases: (
            torch.empty_like(hx),
            hx.new_empty(hx.shape[0], 5 * hx.shape[1]),
        ),
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
        "batch_norm_stats": lambda x, eps: (statistics(x), statistics(x)),
        "batch_norm_gather_stats_with_counts": lambda x, *others: (statistics(x), statistics(x)),
        "batch_norm_elemt": lambda x, *others: torch.empty_like(x),
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_elemt": lambda grad, x, *others: torch.empty_like(x),
    }
    return {getattr(aten, name).default: function for name, function in shapes.items() if hasattr(aten, name)}
