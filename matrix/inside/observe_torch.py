"""See where a PyTorch script's work is done, without touching it: at the calls of backward and at its optimizers.

The autograd graph of the loss holds what is needed: for each node the shape, dtype and device of its values, for each
leaf the parameter, and whether a compiled graph stands between them. It is read in the first backward calls, outside
of anything that Dynamo traces; there is no dispatch mode and no module hook, since both would change what compiles.

Private names used (verified with torch 2.6 to 2.13): `Node._input_metadata`, `torch._dynamo.utils.counters`,
`torch._C._dynamo.eval_frame.skip_code`, `torch._C._len_torch_dispatch_stack`. Whatever is missing is reported as not
seen.
"""

import hashlib
import sys
import weakref

MAX_NODES = 20_000
ENOUGH = 3  # the call of backward at which two whole steps have been seen; also ranks that print nothing come here
FINGERPRINT = 65_536  # elements of a gradient that are hashed
MATMUL = ("mm", "linear", "conv", "attention", "compiledfunction", "matmul", "addmv", "dot")


def observe(after_import):
    """Arrange to look once the script imports torch; it need not, and nothing is imported for it."""
    return Observer(after_import)


class Observer:
    def __init__(self, after_import):
        self.importing = after_import("torch", self.install)
        self.enough = None  # set by the worker: says what was seen, and removes this observer
        self.torch = None
        self.trouble = None
        self.undo = []
        self.calls = 0  # of backward by the script itself
        self.depth = 0  # of backward calls within backward calls: reentrant checkpointing
        self.optimizers = weakref.WeakSet()
        self.work = {}  # device -> elements of values in the graph
        self.dtypes = {}  # dtype -> matmul-like nodes that have it
        self.convolution = False
        self.shapes = set()
        self.parameters = {}  # id -> (parameter, whether a compiled graph yields its gradient)
        self.gradient = None

    def install(self, torch):
        self.torch = torch
        autograd = torch.autograd
        self.replace(autograd, "backward", lambda tensors, *a, **k: self.look(tensors))
        self.replace(autograd, "grad", lambda outputs, *a, **k: self.look(outputs))
        optimizer = torch.optim.Optimizer
        original = optimizer.__init__

        def __init__(this, *args, **kwargs):
            original(this, *args, **kwargs)
            self.optimizers.add(this)

        optimizer.__init__ = __init__
        self.undo.append(lambda: setattr(optimizer, "__init__", original))

    def replace(self, module, name, before):
        """Put a function in front of `module.name` that looks first; Dynamo is told to pass it by."""
        import functools

        original = getattr(module, name)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            self.depth += 1
            try:
                if args:
                    before(*args)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        self.skip(wrapper, self.look, self.walk, self.replace)
        setattr(module, name, wrapper)
        self.undo.append(lambda: setattr(module, name, original))

    def skip(self, *functions):
        try:
            skip_code = self.torch._C._dynamo.eval_frame.skip_code
        except AttributeError:
            return
        for function in functions:
            skip_code(getattr(function, "__func__", function).__code__)

    def remove(self):
        self.importing.remove()
        while self.undo:
            self.undo.pop()()

    def look(self, tensors):
        """Read the graph behind the tensors that a backward call starts from."""
        torch = self.torch
        if torch._C._len_torch_dispatch_stack():
            return  # a compiler traces its own backward, with tensors that hold nothing
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        roots = [
            tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
        ]
        if self.depth == 1:
            self.calls += 1
        if self.calls < ENOUGH:
            self.walk(roots)
        elif self.depth == 1:
            self.enough()

    def walk(self, roots):
        seen, queue = set(), [(node, False, False) for node in roots]
        while queue and len(seen) < MAX_NODES:
            node, shaped, compiled = queue.pop(0)
            if node is None or node in seen:
                continue
            seen.add(node)
            name = node.name()
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.parameters.setdefault(id(variable), (weakref.ref(variable), compiled, node))
                if self.gradient is None:
                    self.gradient = "pending"
                    node.register_prehook(self.fingerprint)
                continue
            compiled = compiled or "CompiledFunction" in name
            values = [(tuple(each.shape), each.dtype, each.device) for each in getattr(node, "_input_metadata", [])]
            if "CompiledFunction" in name and not shaped:
                saved = [each for each in getattr(node, "saved_tensors", ()) if each is not None]
                values += [(tuple(each.shape), each.dtype, each.device) for each in saved]
            matmul = any(word in name.lower() for word in MATMUL)
            self.convolution = self.convolution or "conv" in name.lower()
            for shape, dtype, device in values:
                elements = 1
                for size in shape:
                    elements *= int(size)
                self.work[device] = self.work.get(device, 0) + elements
                if matmul and dtype.is_floating_point:
                    self.dtypes[dtype] = self.dtypes.get(dtype, 0) + 1
                if shape and not shaped:
                    self.shapes.add(tuple(int(size) for size in shape))
            shaped = shaped or any(shape for shape, _, _ in values)
            queue += [(following, shaped, compiled) for following, _ in node.next_functions]

    def fingerprint(self, gradients):
        """Hash this rank's own gradient of one parameter, before ranks exchange anything."""
        for gradient in gradients:
            if gradient is not None and self.gradient == "pending":
                flat = gradient.detach().reshape(-1)[:FINGERPRINT].to("cpu", self.torch.float64)
                self.gradient = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]

    def graphs(self):
        """Graphs that Dynamo captured so far (0 when it was never loaded)."""
        utils = sys.modules.get("torch._dynamo.utils")
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0

    def device(self, device):
        """A device in the words that an accelerator's `owns` reads."""
        torch = self.torch
        described = {
            "platform": device.type,
            "index": device.index,
            "runtime": None,
            "id": str(device),
            "kind": device.type,
        }
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            described["runtime"] = "rocm" if torch.version.hip else "cuda"
            described["kind"] = properties.name
            described["id"] = str(getattr(properties, "uuid", device))
        return described

    def seen(self):
        """What was seen until now, as plain data; see `matrix.truth` for how it is read."""
        torch = self.torch
        if torch is None:
            return {"framework": None}
        leaves = {key: (ref(), compiled) for key, (ref, compiled, _) in self.parameters.items()}
        tensors = {key: (tensor, compiled) for key, (tensor, compiled) in leaves.items() if tensor is not None}
        if self.optimizers:
            held = {id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]}
            tensors = {key: (p, tensors.get(key, (p, False))[1]) for key, p in held.items()}
        devices, whole, local, through = {}, 0, 0, 0
        for tensor, compiled in tensors.values():
            mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            size = mine.numel() * mine.element_size()
            local += size
            whole += tensor.numel() * tensor.element_size()
            through += size if compiled else 0
            devices[mine.device] = devices.get(mine.device, 0) + size
        described = []
        for device in {*devices, *self.work}:
            described.append(
                self.device(device) | {"parameter_bytes": devices.get(device, 0), "work": self.work.get(device, 0)}
            )
        dynamo = sys.modules.get("torch._dynamo.utils")
        counters = dynamo.counters if dynamo is not None else {}
        return {
            "framework": "torch",
            "backward_calls": self.calls,
            "trouble": self.trouble,
            "devices": described,
            "parameter_bytes": {"local": local, "global": whole},
            "shapes": sorted(self.shapes)[:64],
            "parameter_shapes": sorted({tuple(t.shape) for t, _ in tensors.values()})[:512],
            "fingerprint": None if self.gradient == "pending" else self.gradient,
            "dtypes": {str(dtype).removeprefix("torch."): count for dtype, count in self.dtypes.items()},
            "parameter_dtypes": sorted({str(t.dtype).removeprefix("torch.") for t, _ in tensors.values()}),
            "convolution": self.convolution,
            "matmul_precision": self.matmul_precision(),
            "compiled": {
                "graphs": self.graphs(),
                "calls_captured": int(counters["stats"]["calls_captured"]) if counters else 0,
                "inductor": sum(counters["inductor"].values()) if counters else 0,
                "parameter_bytes": through,
            },
        }

    def matmul_precision(self):
        torch = self.torch
        return {
            "matmul": torch.get_float32_matmul_precision(),
            "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32) if torch.backends.cuda.is_built() else None,
        }

    def final(self):
        """What is known at the end: graphs, and the device's own peak memory where it counts that."""
        torch = self.torch
        found = {"graphs": self.graphs(), "device_peak_bytes": None}
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            found["device_peak_bytes"] = max(
                torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())
            )
        return found
