"""Tensors of a device that is not there: which operations on them CUDA would refuse, and what stands in for values.

Loaded by path in the cell's interpreter; standard library and torch only. CPU tensors are real; an operation in which
a tensor of the device takes part is done on shapes (`FakeTensorMode`), after the devices of its tensors were checked.

Private names used: `torch._subclasses.fake_tensor` (`FakeTensor`, `FakeTensorMode.__torch_dispatch__`, its exceptions,
`_check_for_subclass_arg`, `init_gpu_context`), `torch.utils._pytree`, `torch._C.TensorBase`; the table of operators
that ships with torch (`torchgen/packaged/ATen/native/native_functions.yaml`).
Tried with the versions in `fake_cuda.py`.
"""

import copy
import os
import re
import sys
import threading


def read_checks(torch):
    """Which operators look at the devices of their tensors: by PyTorch's own table of them.

    Returns:
        Two sets of names. Around the CUDA kernels of the first, PyTorch demands one device of all tensors, also of
        those without dimensions. The second take tensors on several devices. The others leave it to TensorIterator,
        which lets a CPU tensor without dimensions pass for a number, or are put together of such.
    """
    path = os.path.join(os.path.dirname(torch.__file__), "..", "torchgen/packaged/ATen/native/native_functions.yaml")
    strict = {"stack"}  # which is made of `cat`
    free = {"_foreach_copy_", "_has_compatible_shallow_copy_type"}
    with open(path, encoding="utf-8") as file:
        for entry in file.read().split("\n- func: ")[1:]:
            name = entry.partition("(")[0].strip()
            unchecked = re.search(r"device_check: NoCheck *#?(.*)", entry)
            if unchecked is None and KERNEL.search(entry):
                strict.add(name)
            elif unchecked is not None and not LEFT_TO_OTHERS.search(unchecked[1]):
                free.add(name)
    return strict, free


KERNEL = re.compile(r"^ +(?:structured_delegate:|[\w, ]*\bCUDA\b[\w, ]*:)", re.MULTILINE)
LEFT_TO_OTHERS = re.compile(r"TensorIterator|foreach|Composite")
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))
UNCHANGING = frozenset(
    ("detach", "alias", "clone", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand")
)


class Depth(threading.local):
    depth = 0


def mode_class(torch, tracer):
    """The mode under which the script runs."""
    from torch._subclasses import fake_tensor
    from torch.utils._pytree import tree_iter, tree_map

    fake_tensor.init_gpu_context = lambda device: None  # a build for CUDA would look for a driver
    aten = torch.ops.aten
    FakeTensor = fake_tensor.FakeTensor
    strict, free = read_checks(torch)
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
            if to_device and torch.device(place).index is None:
                kwargs = {**kwargs, "device": torch.device("cuda", torch.cuda.current_device())}
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
            tracer.worked({each.device.index for each in tensors if each.device.type == "cuda"})
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
            except NotImplementedError:  # it has none, and no kernel of the CPU's helps
                tracer.refuse(f"PyTorch has no rule for the shape of what {func} gives")
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
        if func.namespace != "aten" or len({each.device for each in tensors}) < 2:
            return
        if name in INDEXING:
            return check_indexing(name, *args)
        if not free.isdisjoint((name, func._name.removeprefix("aten::"))):
            return
        if name.startswith("_fused_") or name.startswith("_amp_foreach"):
            tensors = [each for each in tensors if each.dim()]  # a learning rate, a scale
        if name.startswith("_foreach_"):  # each place of the lists is an operation of its own
            lists = [
                each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], torch.Tensor)
            ]
            rest = [each for each in args if isinstance(each, torch.Tensor)]
            for members in zip(*lists, strict=True):
                check_together(func, name, [*members, *rest], members[0] if name.endswith("_") else None)
            return
        written = next(
            (a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write),
            None,
        )
        check_together(func, name, tensors, written)

    def check_together(func, name, tensors, written):
        """Raise if tensors are on several devices. CPU tensors without dimensions may pass for numbers."""
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
            if name in ("any", "all", "_is_all_true", "_is_any_true") or name in UNCHANGING:
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

    def bincount(mode, tensor, weights=None, minlength=0):
        tracer.note("sizes", "bincount")
        dtype = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
        return torch.empty(max(minlength, 1), dtype=dtype, device=tensor.device)

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

    def equal(mode, one, other, *tolerances, **named):
        tracer.note("branches", "comparison")
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
        aten.bincount.default: within(bincount),
        aten.index.Tensor: within(index),
        aten._local_scalar_dense.default: scalar,
        aten.equal.default: equal,
        aten.allclose.default: equal,
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


for each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Unknown, f"__{each}__", _kept(f"__{each}__"))
    setattr(Unknown, f"__r{each}__", _kept(f"__r{each}__"))
for each in ("neg", "abs", "round"):
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
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
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


def keep_checkpoints(torch):
    """`torch.save` keeps what it is given in memory, `torch.load` gives it back: no file gets stand-ins."""
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
