"""Trace a PyTorch script on a CUDA device that is not there: shapes and devices, no values.

An observer for `worker.py`. CPU tensors are real and are computed with, so that data can be read and sampled as ever;
tensors on the device are fake (`FakeTensorMode`), and an operation that CUDA would refuse for the devices of its
tensors raises what PyTorch raises, at the script's line. Where a value of the device is asked for, a stand-in is given
and the line is noted as a host sync. After the asked number of optimizer steps the script is ended.

Told at the end, as the event `traced`:

    steps, operations   optimizer steps, and operations on the device, that were traced
    parameters          bytes of what the optimizers update, by kind of device
    syncs               [{file, line, how, calls}]: where the host waits for a value of the device
    branches            [...]: where a value of the device decides which way the script goes (taken as false)
    sizes               [...]: where a value decides a shape (a mask taken as all true)
    reached             `end`, or `steps`: ended by us after the asked number of them
    unable              why it could not be traced further, and where; null when it could

Private names used: `torch._subclasses.fake_tensor` (`FakeTensor`, `FakeTensorMode.__torch_dispatch__` and its
exceptions), `torch.utils._python_dispatch`, `torch.utils._pytree`, `torch.serialization`; the table of operators that
ships with torch (`torchgen/packaged/ATen/native/native_functions.yaml`). Versions: see `fake_cuda.py`.
"""

import atexit
import collections
import contextlib
import copy
import os
import re
import sys
import threading
import warnings

STEPS = 2
MAX_BRANCHES = 1000  # at one line: a loop that waits for a value to change
LIBRARIES = ("site-packages", "dist-packages")


def sibling(name):
    """What the Python file beside this one defines."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    namespace = {"__name__": "<inside>", "__file__": path}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    return namespace


def observe(after_import):
    return Tracer(after_import)


class Tracer:
    """Puts the fake device under the script's PyTorch, and keeps what is to be told."""

    enough = None  # a trace has to see everything

    def __init__(self, after_import):
        self.fake = sibling("fake_cuda.py")
        self.task, self.emit = {}, None
        self.torch = None
        self.steps = collections.Counter()
        self.operations = 0
        self.parameters = {}
        self.places = {kind: collections.Counter() for kind in ("syncs", "branches", "sizes")}
        self.reached = "end"
        self.unable = None
        self.code = 0
        self.root = os.path.join(os.getcwd(), "")  # the workload's folder
        after_import("torch", self.start)

    def start(self, torch):
        """Called when the script has imported torch."""
        reason = self.fake["untried"](torch)
        if reason is not None:
            self.refuse(reason)
        self.torch = torch
        target = self.task.get("target", {})
        device = {
            "runtime": target.get("accelerator", "cuda"),
            "name": target.get("about") or "NVIDIA GPU",
            "count": self.task.get("devices", 1),
            "memory_bytes": target.get("memory_bytes") or 80 << 30,
            "capability": self.task.get("capability", (9, 0)),
        }
        print("# traced on a device that is not there: the numbers below are stand-ins, none is a loss", flush=True)
        mode = mode_class(torch, self)()  # before there "is" a GPU: PyTorch asks, to know how careful to be
        mode.__enter__()
        self.fake["install"](torch, device)
        give_stand_ins(torch, self)
        keep_checkpoints(torch, self)
        atexit.register(self.leave)
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # copies do, harmlessly
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self.before_step)
        hooks.register_optimizer_step_post_hook(self.after_step)

    def before_step(self, optimizer, arguments, named):
        if self.steps[id(optimizer)] >= self.task.get("steps", STEPS):
            self.reached = "steps"
            raise SystemExit(0)

    def after_step(self, optimizer, arguments, named):
        self.steps[id(optimizer)] += 1
        for group in optimizer.param_groups:
            for each in group["params"]:
                self.parameters[id(each)] = each.device.type, each.numel() * each.element_size()

    def note(self, kind, how):
        """Count that something happens at the script's line that is being executed."""
        file, line = self.place()
        self.places[kind][file, line, how] += 1
        if kind == "branches" and self.places[kind][file, line, how] > MAX_BRANCHES:
            self.refuse("a loop waits for a value of the device to change")

    def place(self):
        """File and line of the script's code, or of what it imports from beside it, that is being executed."""
        frame = sys._getframe(1)
        if threading.current_thread() is not threading.main_thread():  # a backward pass has threads of its own
            frame = sys._current_frames().get(threading.main_thread().ident, frame)
        while frame is not None:
            file = frame.f_code.co_filename
            if os.path.abspath(file).startswith(self.root) and not any(name in file for name in LIBRARIES):
                return os.path.relpath(file, self.root), frame.f_lineno
            frame = frame.f_back
        return "?", 0

    def refuse(self, reason):
        """End the script: it cannot be traced further."""
        file, line = self.place()
        self.unable = self.unable or f"{file}:{line}: {reason}" if line else reason
        raise self.fake["Untraceable"](self.unable)

    def graphs(self):
        return 0

    def seen(self):
        return {}

    def remove(self):
        pass

    def final(self):
        totals = collections.Counter()
        for kind, size in self.parameters.values():
            totals[kind] += size
        told = {
            kind: [{"file": f, "line": n, "how": how, "calls": c} for (f, n, how), c in sorted(found.items())]
            for kind, found in self.places.items()
        }
        self.emit(
            "traced",
            steps=max(self.steps.values(), default=0),
            operations=self.operations,
            parameters=dict(totals),
            reached=self.reached,
            unable=self.unable,
            **told,
        )
        error = sys.exc_info()[1]
        if error is not None:
            code = getattr(error, "code", 1)
            self.code = code if isinstance(code, int) else int(code is not None)
        return {"graphs": 0, "device_peak_bytes": None}

    def leave(self):
        """End the process before Python is taken down, which the threads of a backward pass may not survive."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or replaced by the script
                stream.flush()
        os._exit(self.code)


def read_checks(torch):
    """Names of the operators whose CUDA kernels demand one device of all tensors, also of those without dimensions.

    From PyTorch's own table: the code around a kernel checks devices unless the table says `device_check: NoCheck`,
    as it does for what is left to TensorIterator, which lets a CPU tensor without dimensions pass for a number.
    """
    path = os.path.join(os.path.dirname(torch.__file__), "..", "torchgen/packaged/ATen/native/native_functions.yaml")
    strict = {"stack"}  # which is put together of `cat`
    with open(path, encoding="utf-8") as file:
        for entry in file.read().split("\n- func: ")[1:]:
            kernel = re.search(r"^ +(?:structured_delegate:|[\w, ]*\bCUDA\b[\w, ]*:)", entry, re.MULTILINE)
            if kernel and "device_check: NoCheck" not in entry:
                strict.add(entry.partition("(")[0].strip())
    return strict


COPIES = frozenset("copy_ _to_copy _copy_from _foreach_copy_ is_same_size set_ _has_compatible_shallow_copy_type".split())
INDEXING = frozenset("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split())
INVALUABLE = frozenset("detach alias clone _to_copy view _unsafe_view reshape squeeze unsqueeze expand".split())


class Depth(threading.local):
    depth = 0


def mode_class(torch, tracer):
    """The mode under which the script runs."""
    from torch._subclasses import fake_tensor
    from torch.utils._pytree import tree_iter, tree_map

    aten = torch.ops.aten
    FakeTensor = fake_tensor.FakeTensor
    strict = read_checks(torch)
    cpu = torch.device("cpu")
    DeviceMismatch = tracer.fake["DeviceMismatch"]

    class Mode(fake_tensor.FakeTensorMode):
        def __init__(self):
            super().__init__(allow_non_fake_inputs=True)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if self.inside.depth:  # PyTorch takes an operation apart: all of it is fake
                return super().__torch_dispatch__(func, types, args, kwargs)
            tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
            if any(fake_tensor._check_for_subclass_arg(each) for each in tensors):
                return NotImplemented  # a DTensor, say: it takes itself apart
            place = kwargs.get("device")
            to_device = place is not None and torch.device(place).type == "cuda"
            self.check_generator(kwargs.get("generator"), tensors, to_device)
            if func.namespace == "c10d":
                check_collective(tensors)
            if not to_device and not any(isinstance(each, FakeTensor) for each in tensors):
                return func(*args, **kwargs)
            if os.getpid() != self.pid:
                raise RuntimeError(
                    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
                    "the 'spawn' start method"
                )
            tracer.operations += 1
            name = func._schema.name.removeprefix("aten::")
            check_devices(func, name, args, kwargs, tensors)
            return self.follow(func, name, types, args, kwargs)

        pid = os.getpid()
        inside = Depth()

        def shapes_of(self, func, types, args, kwargs):
            """The results of PyTorch's own rules."""
            self.inside.depth += 1
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.inside.depth -= 1

        def check_generator(self, generator, tensors, to_device):
            if generator is None:
                return
            wanted = "cuda" if to_device or any(each.device.type == "cuda" for each in tensors) else "cpu"
            found = tracer.fake["place_of"](torch, generator).type
            if found != wanted:
                raise DeviceMismatch(f"Expected a '{wanted}' device type for generator but found '{found}'")

        def follow(self, func, name, types, args, kwargs):
            """The operation on shapes; what needs a value gets a stand-in."""
            own = STAND_INS.get(func)
            if own is not None:
                found = own(self, *args, **kwargs)
                if found is not NotImplemented:
                    return found
            if name in ("_to_copy", "copy_"):
                note_copy(name, args, kwargs)
            real = {}

            def enter(value):
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    entered = self.like(value)
                    real[id(entered)] = value
                    return entered
                return value

            fakes = tree_map(enter, (args, kwargs))
            try:
                found = self.shapes_of(func, types, *fakes)
            except fake_tensor.FakeTensorDeviceMismatchError:  # of what CUDA takes: see `check_devices`
                moved = tree_map(lambda v: self.like(v, "cuda") if isinstance(v, FakeTensor) else v, fakes)
                found = self.shapes_of(func, types, *moved)
            except (
                fake_tensor.DataDependentOutputException,
                fake_tensor.DynamicOutputShapeException,
                fake_tensor.UnsupportedOperatorException,
            ) as error:
                tracer.refuse(f"what {func} gives depends on values ({type(error).__name__})")
            except NotImplementedError as error:
                tracer.refuse(f"PyTorch has no rule for the shape of what {func} gives: {str(error)[:200]}")
            assume(func, name, args, found)
            return tree_map(lambda value: real.get(id(value), value), found)

        def like(self, tensor, device="cpu"):
            """A fake of a tensor; PyTorch's own way leaves weak references to it, and would end moving it in place."""
            if tensor.layout != torch.strided or tensor.is_quantized:
                return self.from_tensor(tensor)
            named = {"dtype": tensor.dtype, "device": torch.device(device)}
            empty = aten.empty_strided.default
            return self.shapes_of(empty, (), (list(tensor.size()), list(tensor.stride())), named)

    def check_devices(func, name, args, kwargs, tensors):
        """Raise where CUDA would refuse the devices of an operation's tensors."""
        if name == "_pack_padded_sequence":
            if args[1].device != cpu:
                raise DeviceMismatch(
                    f"'lengths' argument should be a 1D CPU int64 tensor, but got 1D {args[1].device} Long tensor"
                )
            return
        if len(tensors) < 2 or name in COPIES or len({each.device for each in tensors}) == 1:
            return
        if name in INDEXING:
            return check_indexing(name, *args)
        if name.startswith("_fused_") or name.startswith("_amp_foreach"):
            tensors = [each for each in tensors if each.dim()]  # a learning rate, a scale
        if name.startswith("_foreach_"):  # each place of the lists is an operation of its own
            lists = [each for each in args if isinstance(each, (list, tuple)) and isinstance(each[0], torch.Tensor)]
            rest = [each for each in args if isinstance(each, torch.Tensor)]
            for members in zip(*lists, strict=True):
                check_together(func, name, [*members, *rest], members[0] if name.endswith("_") else None)
            return
        written = next((a for a, s in zip(args, func._schema.arguments) if s.alias_info and s.alias_info.is_write), None)
        check_together(func, name, tensors, written)

    def check_together(func, name, tensors, written):
        """Raise if tensors are on several devices; CPU tensors without dimensions pass for numbers where CUDA takes them."""
        device = next((each.device for each in tensors if each.device != cpu), cpu)
        lenient = strict.isdisjoint((name, func._name.removeprefix("aten::")))
        for each in tensors:
            number = each.device == cpu and each.dim() == 0 and each is not written
            if each.device == device or (number and lenient):
                continue
            if name.startswith("masked_fill") and each is tensors[1]:
                raise DeviceMismatch(
                    f"expected self and mask to be on the same device, but got mask on {each.device} and self on "
                    f"{tensors[0].device}"
                )
            raise DeviceMismatch(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {each.device}! (in {func})"
            )

    def check_collective(tensors):
        served = tracer.fake["SERVED"]
        for each in tensors:
            if served and each.device.type not in served:
                raise DeviceMismatch(f"No backend type associated with device type {each.device.type}")

    def check_indexing(name, target, indices, values=None, *rest):
        for each in indices:
            if each is not None and each.device not in (cpu, target.device):
                raise DeviceMismatch(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({target.device})"
                )
        if isinstance(values, torch.Tensor) and values.device != target.device and values.dim():
            raise DeviceMismatch(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{target.device} and {values.device}! (in aten.{name})"
            )

    def note_copy(name, args, kwargs):
        """A copy to the CPU waits for the device, unless the script says that it need not."""
        source, to = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if to is not None and torch.device(to) == cpu and source.device.type == "cuda" and waits:
            tracer.note("syncs", "copy to the CPU")

    def assume(func, name, args, found):
        """Follow what is known of a value if all numbers are finite: scripts ask that, and end if they are not."""
        if not isinstance(found, FakeTensor):
            return
        known = [getattr(each, "assumed", None) for each in args if isinstance(each, torch.Tensor)]
        value = None
        if name in ("isnan", "isinf") or (name == "ne" and len(args) > 1 and args[0] is args[1]):
            value = False
        elif (name == "eq" and len(args) > 1 and args[0] is args[1]) or (name == "ne" and args[1] == float("inf")):
            value = True
        elif known and None not in known:
            if name in ("any", "all") or name in INVALUABLE:
                value = known[0]
            elif name in ("logical_not", "bitwise_not"):
                value = not known[0]
            elif name in ("mul", "logical_and", "bitwise_and"):
                value = all(known)
            elif name in ("logical_or", "bitwise_or"):
                value = any(known)
        if value is not None:
            found.assumed = value

    def nonzero(mode, tensor):
        tracer.note("sizes", "nonzero")
        return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=tensor.device)

    def masked_select(mode, tensor, mask):
        tracer.note("sizes", "masked_select")
        size = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
        return torch.empty(size, dtype=tensor.dtype, device=tensor.device)

    def index(mode, tensor, indices):
        if not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
            return NotImplemented
        numbers = []
        for each in indices:
            if each is None or each.dtype not in (torch.bool, torch.uint8):
                numbers.append(each)
            elif isinstance(each, FakeTensor):
                tracer.note("sizes", "index by a mask")
                size = each.numel()
                numbers += [torch.empty(size, dtype=torch.int64, device=tensor.device) for _ in range(each.dim())]
            else:
                numbers += each.nonzero().unbind(1)
        with mode:
            return aten.index.Tensor(tensor, numbers)

    def scalar(mode, tensor):
        return tracer.value(tensor, "item")

    def equal(mode, one, other):
        tracer.note("branches", "torch.equal")
        return False

    def kernel(function):
        return lambda mode, *args, **kwargs: function(*args, **kwargs)

    def within(function):
        def run(mode, *args, **kwargs):
            with mode:
                return function(mode, *args, **kwargs)

        return run

    STAND_INS = {
        aten.nonzero.default: within(nonzero),
        aten.masked_select.default: within(masked_select),
        aten.index.Tensor: within(index),
        aten._local_scalar_dense.default: scalar,
        aten.equal.default: equal,
    }
    STAND_INS |= {func: within(kernel(shapes)) for func, shapes in tracer.fake["kernel_shapes"](torch).items()}

    def value(tensor, how):
        """A stand-in for the number that a tensor holds; waiting for it is noted."""
        if tensor.device != cpu:
            tracer.note("syncs", how)
        if tensor.dtype is torch.bool:
            return bool(getattr(tensor, "assumed", False))
        return 1.0 if tensor.dtype.is_floating_point else 1j if tensor.dtype.is_complex else 1

    tracer.value = value
    return Mode


class Unknown(float):
    """The number that stands in for one of the device: finite, as most scripts check, and never printed as a number."""

    def __repr__(self):
        return "<no value>"

    __str__ = __repr__

    def __format__(self, how):
        return "<no value>"


def _kept(name):
    def operator(self, *others):
        found = getattr(float, name)(self, *others)
        return found if found is NotImplemented else Unknown(found)

    return operator


for each in "add radd sub rsub mul rmul truediv rtruediv neg abs pow rpow".split():
    setattr(Unknown, f"__{each}__", _kept(f"__{each}__"))


def give_stand_ins(torch, tracer):
    """Answer what Python asks of a fake tensor: its number, its text, its array."""
    from torch._subclasses.fake_tensor import FakeTensor

    Tensor = torch.Tensor

    def patch(name, own):
        original = getattr(Tensor, name)

        def method(self, *arguments, **named):
            if isinstance(self, FakeTensor):
                return own(self, *arguments, **named)
            return original(self, *arguments, **named)

        method.__name__ = name
        setattr(Tensor, name, method)

    def one(tensor, how):
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
        return tracer.value(tensor, how)

    def item(tensor):
        if sys._getframe(2).f_code.co_filename.endswith("grad_scaler.py"):
            one(tensor, "GradScaler")
            return 0.0  # no overflow was found
        found = one(tensor, "item")
        return Unknown(found) if type(found) is float else found

    def boolean(tensor):
        found = one(tensor, "bool")
        if getattr(tensor, "assumed", None) is None:
            tracer.note("branches", "bool")
            return False
        return bool(found)

    def nested(shape, leaf):
        return [nested(shape[1:], leaf) for _ in range(shape[0])] if shape else leaf

    def tolist(tensor):
        found = tracer.value(tensor, "tolist")
        return nested(tensor.shape, Unknown(found) if type(found) is float else found)

    def text(tensor, *, tensor_contents=None):
        if tensor.device.type == "cuda":
            tracer.note("syncs", "print")
        return f"tensor(<no value>, size={tuple(tensor.shape)}, device='{tensor.device}')"

    def formatted(tensor, how):
        return format(item_of(tensor), how) if tensor.dim() == 0 else text(tensor)

    def item_of(tensor):
        found = one(tensor, "print")
        return Unknown(found) if type(found) is float else found

    def numpy(tensor, *, force=False):
        if force:
            tensor = tensor.detach().cpu()
        if tensor.device.type != "cpu":
            raise tracer.fake["NotConvertible"](
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()

    patch("item", item)
    patch("__bool__", boolean)
    patch("__float__", lambda tensor: float(one(tensor, "float")))
    patch("__int__", lambda tensor: int(one(tensor, "int")))
    patch("__index__", lambda tensor: int(one(tensor, "index")))
    patch("__repr__", text)
    patch("__format__", formatted)
    patch("numpy", numpy)
    patch("tolist", tolist)
    FakeTensor.tolist = Tensor.tolist
    FakeTensor.__repr__ = Tensor.__repr__
    patch_data(torch, FakeTensor)


def patch_data(torch, FakeTensor):
    """`tensor.data = other` also where one of them is real and the other is fake."""
    original = torch._C.TensorBase.data

    def assign(self, value):
        if isinstance(self, FakeTensor) == isinstance(value, FakeTensor) and self.device == value.device:
            original.__set__(self, value)
            return
        value = value.detach().clone()
        made = torch.nn.Parameter(value, self.requires_grad) if isinstance(self, torch.nn.Parameter) else value
        torch.utils.swap_tensors(self, made)

    torch.Tensor.data = property(lambda self: original.__get__(self), assign)


def keep_checkpoints(torch, tracer):
    """`torch.save` keeps what it is given in memory, `torch.load` gives it back: no file gets stand-ins."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_map

    kept = {}
    original = torch.load

    def key(file):
        return os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else id(file)

    def save(obj, f, *arguments, **named):
        kept[key(f)] = copy.deepcopy(obj), f  # a buffer lives as long, or its id may be another's

    def load(f, map_location=None, *arguments, **named):
        if key(f) not in kept:
            place = "cpu" if map_location is None else map_location
            if not callable(place) and not isinstance(place, dict) and torch.device(place).type == "cuda":
                return moved(original(f, "cpu", *arguments, **named), torch.device(place))
            return original(f, map_location, *arguments, **named)
        obj = copy.deepcopy(kept[key(f)][0])
        if map_location is None or callable(map_location) or isinstance(map_location, dict):
            return obj
        return moved(obj, torch.device(map_location))

    def moved(obj, place):
        def move(value):
            if isinstance(value, torch.Tensor) and (value.device.type != place.type):
                return value.detach().to(place)
            return value.to(place) if isinstance(value, torch.nn.Module) else value

        return tree_map(move, obj)

    torch.save, torch.load = save, load
    del FakeTensor
