"""See where a PyTorch script's work is done, without touching it: where its backward passes enter the engine.

The autograd graph of the loss holds what is needed: for each node the shape, dtype and device of its values, for each
leaf the parameter, and whether a compiled graph yields its gradient. It is read when `torch.autograd` hands the first
backward passes to its engine, outside of anything that Dynamo traces. `torch.autograd.backward` and `grad` stay what
they are (Dynamo knows them by identity), and there is no dispatch mode, since both would change what compiles.

Inference has no backward. There the outputs of modules are seen by a global forward hook, which exists only until the
script loads Dynamo: a compiled module must not see one. After that, Dynamo's own records have to do.

Private names used (verified with torch 2.13): `torch.autograd._engine_run_backward`, `Node._input_metadata`,
`Node._raw_saved_*`, `SavedTensor.unpack_hook`, `torch._dynamo.utils.counters` and `get_compilation_metrics`,
`torch._C._len_torch_dispatch_stack`, `torch._C._functorch.peek_interpreter_stack`, `Module._parameters`, and of
`torch._C._dynamo.eval_frame` `set_eval_frame`, `set_code_exec_strategy` and, in older versions, `skip_code`.
Whatever is missing is reported as not seen.
"""

import collections
import contextlib
import gc
import hashlib
import sys
import warnings
import weakref

MAX_NODES = 20_000
CALLS = 3  # of backward, at least, before a rank that prints nothing is seen enough of
REPEATS = 2  # of them in a row that reach no parameter of a shape that was not reached before
MANY = 50  # calls after which nothing new is waited for
HASHED = 65_536  # elements of a tensor that are hashed
LEAVES = 4  # parameters whose gradients are hashed
MAX_ROWS, ROW_ELEMENTS = 4096, 8  # of a tensor whose rows are hashed each: at most, at least
MAX_BATCHES = 8  # tensors whose rows are hashed
GAVE_UP = "recompile limit exceeded"  # what Dynamo counts among the unimplemented
MATMUL = (
    "mm", "linear", "conv", "attention", "compiledfunction", "matmul", "mv", "dot", "rnn", "lstm", "gru", "einsum",
)  # fmt: skip
# Nodes that change no value of a parameter, but its shape or dtype.
PASSING = ("ToCopy", "View", "T", "Transpose", "Expand", "Clone", "Alias", "Permute", "UnsafeView")


def observe(after_import):
    """Arrange to look once the script imports torch; it need not, and nothing is imported for it."""
    return Observer(after_import)


def digest(tensors):
    """Hash of the values of some tensors that were fetched, or None where they have none that tell: not to be had, no
    elements, all zero, not finite."""
    found = hashlib.sha256()
    telling = False
    for mine in tensors:
        if mine is None:
            return None
        flat = mine.reshape(-1)[:HASHED].cpu()
        flat = flat.double() if flat.is_floating_point() else flat.long()
        if not bool(flat.isfinite().all()):
            return None
        telling = telling or bool(flat.any())
        found.update(flat.numpy().tobytes())
    return found.hexdigest()[:16] if telling else None


def row_digests(mine):
    """Hashes of the rows of a fetched batch, in no order; None for what has no rows that tell examples apart."""
    if mine.dim() < 2 or not 2 <= mine.size(0) <= MAX_ROWS or mine[0].numel() < ROW_ELEMENTS:
        return None
    rows = mine.reshape(mine.size(0), -1)[:, :MAX_ROWS].cpu()
    rows = rows.double() if rows.is_floating_point() else rows.long()
    telling = [row for row in rows.numpy() if (row != row[0]).any()]
    return sorted({hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in telling}) or None


class Observer:
    def __init__(self, after_import):
        self.finders = [
            after_import("torch", self.install),
            after_import("torch._dynamo", lambda _: self.ignore_modules()),
        ]
        self.enough = None  # set by the worker: says what was seen, and removes this observer
        self.torch = None
        self.trouble = None
        self.undo = []
        self.modules = None  # the global forward hook, while there is one
        self.calls = 0  # of backward by the script itself
        self.repeated = 0  # calls in a row that reached nothing new
        self.depth = 0  # of backward calls within backward calls: reentrant checkpointing
        self.work = {}  # device -> elements of values in the graph
        self.forwards = {}  # device -> elements of modules' outputs, in inference
        self.dtypes = {}  # dtype -> matmul-like nodes that have it
        self.convolution = False
        self.shapes = set()  # of values between the loss and the nearest matmul-like node of each path
        self.leaves = {}  # id -> Leaf
        self.gradients = {}  # of the first leaves: what was hashed
        self.inputs = hashlib.sha256()
        self.has_inputs = False
        self.rows = []  # of the tensors that were hashed: the hashes of their rows
        self.generators = set()  # states of the random number generators, at each backward pass
        self.fed = 0  # outputs of modules whose inputs were hashed

    def install(self, torch):
        self.torch = torch
        autograd = torch.autograd
        original = autograd._engine_run_backward
        blind = self.blind()

        def _engine_run_backward(outputs, *args, **kwargs):
            look(outputs)
            self.depth += 1
            try:
                return original(outputs, *args, **kwargs)
            finally:
                self.depth -= 1

        def look(outputs):
            before = blind(None)
            try:
                self.look(outputs)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            finally:
                blind(before)

        self.pass_by(_engine_run_backward, look)
        autograd._engine_run_backward = _engine_run_backward
        self.undo.append(lambda: setattr(autograd, "_engine_run_backward", original))
        if "torch._dynamo" not in sys.modules:
            register = torch.nn.modules.module.register_module_forward_hook
            self.modules = register(self.forward_hook)

    def blind(self):
        """The function that takes Dynamo's eyes off this thread, and gives them back."""
        try:
            return self.torch._C._dynamo.eval_frame.set_eval_frame
        except AttributeError:
            return lambda callback: callback

    def pass_by(self, *functions):
        """Tell Dynamo not to compile the functions, but what they call as it would without them."""
        try:
            frames = self.torch._C._dynamo.eval_frame
            for function in functions:
                if hasattr(frames, "set_code_exec_strategy"):
                    action = frames._FrameAction
                    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
                    frames.set_code_exec_strategy(function.__code__, strategy)
                else:
                    frames.skip_code(function.__code__)
        except AttributeError as error:
            self.trouble = f"Dynamo may trace the observer: {error}"

    def ignore_modules(self):
        if self.modules is not None:
            self.modules.remove()
            self.modules = None

    def remove(self):
        for finder in self.finders:
            finder.remove()
        self.ignore_modules()
        while self.undo:
            self.undo.pop()()
        self.leaves.clear()

    def look(self, outputs):
        """Read the graph behind the tensors that a backward pass starts from."""
        torch = self.torch
        if torch._C._len_torch_dispatch_stack():
            return  # a compiler traces its own backward, with tensors that hold nothing
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        roots = [each.grad_fn if isinstance(each, torch.Tensor) else getattr(each, "node", None) for each in outputs]
        if self.depth == 0:
            self.calls += 1
            if self.calls > CALLS and (self.repeated >= REPEATS or self.calls > MANY):
                self.enough()
                return
            if self.calls == 1:  # what modules were fed with before was no training
                self.shapes, self.inputs, self.has_inputs, self.rows = set(), hashlib.sha256(), False, []
                self.dtypes, self.convolution = {}, False
            if self.calls <= CALLS and not self.transforming():
                self.generators.add(self.generator())
        known = {leaf.shape for leaf in self.leaves.values()}
        self.walk([root for root in roots if root is not None])
        if self.depth == 0:
            self.repeated = self.repeated + 1 if known == {leaf.shape for leaf in self.leaves.values()} else 0

    def walk(self, roots):
        seen, queue = set(), collections.deque((node, None, False) for node in roots)
        while queue and len(seen) < MAX_NODES:
            node, above, deep = queue.popleft()
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.reach(node, variable, above == "compiled")
                continue
            if node in seen:
                continue
            seen.add(node)
            name = node.name()
            compiled = "CompiledFunction" in name
            values = [(tuple(each.shape), each.dtype, each.device) for each in getattr(node, "_input_metadata", [])]
            if compiled and not deep:
                values += [(tuple(each.shape), each.dtype, each.device) for each in self.saved(node)]
            matmul = any(word in name.lower() for word in MATMUL)
            self.convolution = self.convolution or "conv" in name.lower()
            for shape, dtype, device in values:
                elements = 1
                for size in shape:
                    elements *= int(size)
                self.work[device] = self.work.get(device, 0) + elements
                if matmul and dtype.is_floating_point:
                    self.dtypes[dtype] = self.dtypes.get(dtype, 0) + 1
                if shape and not deep:
                    self.shapes.add(tuple(int(size) for size in shape))
            following = [each for each, _ in node.next_functions if each is not None]
            if self.calls == 1 and not compiled and following:
                leaves = [self.leaf_of(each) for each in following]
                if all(each is not None for each in leaves):
                    self.read_inputs(node, leaves)
            kept = above if name.removesuffix("0").removesuffix("Backward") in PASSING else None
            below = "compiled" if compiled else kept
            queue += [(each, below, deep or matmul) for each in following]

    def leaf_of(self, node):
        """The parameter that a node passes on as it is, in another shape or in another dtype; None if it computes."""
        while node is not None:
            variable = getattr(node, "variable", None)
            if variable is not None:
                return variable
            if node.name().removesuffix("0").removesuffix("Backward") not in PASSING:
                return None
            node = node.next_functions[0][0] if node.next_functions else None
        return None

    def saved(self, node):
        """The tensors that a node saved, unless something else than autograd would have to bring them back."""
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names:
            raw = getattr(node, name)
            for each in raw if isinstance(raw, (list, tuple)) else [raw]:
                # A checkpoint would compute again; where that cannot be told, nothing is touched.
                if each is not None and getattr(each, "unpack_hook", self) is not None:
                    return []
        found = []
        for name in names:
            value = getattr(node, "saved_tensors" if name == "_raw_saved_tensors" else name.replace("_raw", "", 1))
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [each for each in values if isinstance(each, self.torch.Tensor)]
        return found

    def read_inputs(self, node, parameters):
        """Hash what a first operation was fed with, beside the parameters."""
        held = {self.storage(each) for each in parameters}
        self.hash([each for each in self.saved(node) if self.storage(each) not in held])

    def fetch(self, tensor):
        """A tensor's values (a sharded one's, this rank's) as they are; None where to have them would run something."""
        mine = tensor.detach()
        return mine.to_local() if hasattr(mine, "to_local") else mine

    def storage(self, tensor):
        """The address of what a tensor is a view of; None for one without storage."""
        try:
            return tensor.untyped_storage().data_ptr() or None
        except (RuntimeError, NotImplementedError):
            return None

    def transforming(self):
        """Whether a transform of `torch.func` is at work, in which no operation of ours would give plain values."""
        return self.torch._C._functorch.peek_interpreter_stack() is not None

    def hash(self, tensors):
        if self.transforming():
            return
        fetched = [(each, values) for each in tensors if (values := self.fetch(each)) is not None]
        found = digest(values for _, values in fetched)
        if found is not None:
            self.inputs.update(found.encode())
            self.has_inputs = True
            plain = [values for each, values in fetched if not hasattr(each, "to_local")]
            batches = (row_digests(values) for values in plain[:MAX_BATCHES])
            self.rows = (self.rows + [each for each in batches if each is not None])[:MAX_BATCHES]

    def reach(self, node, variable, compiled):
        leaf = self.leaves.get(id(variable))
        if leaf is not None and leaf.variable() is variable:
            leaf.compiled = leaf.compiled or compiled
            return
        shapes = [tuple(int(size) for size in each.shape) for each in getattr(node, "_input_metadata", [])]
        leaf = Leaf(variable, shapes[0] if shapes else tuple(variable.shape), compiled, self.calls)
        self.leaves[id(variable)] = leaf
        number = len(self.leaves)
        if number > LEAVES or self.calls != 1:
            return

        def fingerprint(gradients):
            """This rank's own gradient, before ranks exchange anything."""
            before = blind(None)
            try:
                known = number in self.gradients or self.transforming()
                if not known and gradients and gradients[0] is not None:
                    self.gradients[number] = digest([self.fetch(gradients[0])])
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            finally:
                blind(before)

        blind = self.blind()
        self.pass_by(fingerprint)
        self.undo.append(node.register_prehook(fingerprint).remove)

    def forward_hook(self, module, args, output):
        try:
            self.forward(module, args, output)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def forward(self, module, args, output):
        """What a module gave out, where no gradient is wanted: inference."""
        torch = self.torch
        if self.calls or torch._C._len_torch_dispatch_stack() or self.transforming():
            return
        outputs = output if isinstance(output, (list, tuple)) else [output]
        weights = [each for each in module._parameters.values() if each is not None]
        for tensor in outputs:
            if not isinstance(tensor, torch.Tensor) or tensor.requires_grad:
                continue
            self.forwards[tensor.device] = self.forwards.get(tensor.device, 0) + tensor.numel()
            if tensor.is_floating_point() and any(each.dim() > 1 for each in weights):
                self.dtypes[tensor.dtype] = self.dtypes.get(tensor.dtype, 0) + 1
                self.convolution = self.convolution or any(each.dim() > 2 for each in weights)
            self.shapes.add(tuple(tensor.shape))
            if self.fed < LEAVES:
                self.fed += 1
                self.hash([each for each in args if isinstance(each, torch.Tensor)])

    def generator(self):
        """A hash of the default generators' states: it changes when a forward pass draws (dropout, noise)."""
        torch = self.torch
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            states.append(torch.cuda.get_rng_state())
        return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()

    def graphs(self):
        """Graphs compiled so far."""
        return self.captured()

    def captured(self):
        """Graphs that Dynamo captured so far (0 when it was never loaded)."""
        utils = sys.modules.get("torch._dynamo.utils")
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0

    def warm(self):
        """Whether every compiled graph came out of Inductor's cache; None when Inductor compiled nothing."""
        utils = sys.modules.get("torch._dynamo.utils")
        counts = utils.counters["inductor"] if utils is not None else {}
        hits, misses = counts.get("fxgraph_cache_hit", 0), counts.get("fxgraph_cache_miss", 0)
        return bool(hits and not misses) if self.graphs() and counts else None

    def gave_up(self):
        """The function that Dynamo stopped compiling because it had compiled it too often; None if there is none."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None or not any(GAVE_UP in reason for reason in utils.counters["unimplemented"]):
            return None
        for each in utils.get_compilation_metrics():
            if GAVE_UP in (each.fail_reason or ""):
                return f"{each.co_name} ({each.co_filename}:{each.co_firstlineno})"
        return "a function"

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

    def held(self, tensor):
        """The bytes of a tensor on each device that holds some of it."""
        return {tensor.device: tensor.numel() * tensor.element_size()}

    def spread(self, work):
        """The work by device; here PyTorch's devices are the ones that do it."""
        return work

    def alive(self, kind):
        """The living objects of a class; found by their type, so that no object's own code is asked."""
        return [each for each in gc.get_objects() if issubclass(type(each), kind)]

    def parameters(self):
        """The parameters: those of the optimizers, else those that a backward pass reached, else those of modules."""
        torch = self.torch
        optimizers = [each for each in self.alive(torch.optim.Optimizer) if hasattr(each, "param_groups")]
        held = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
        if not held:
            held = {key: p for key, leaf in self.leaves.items() if (p := leaf.variable()) is not None}
        if not held and not self.calls:
            held = {id(p): p for each in self.alive(torch.nn.Module) for p in each.__dict__["_parameters"].values()}
        return [p for p in held.values() if isinstance(p, torch.Tensor)]

    def seen(self):
        """What was seen until now, as plain data; see `matrix.truth` for how it is read."""
        torch = self.torch
        if torch is None:
            return {"framework": None}
        parameters = self.parameters()
        devices, whole, local, shapes, plain = {}, 0, 0, set(), True
        for tensor in parameters:
            shapes.add(tuple(tensor.shape))
            plain = plain and not hasattr(tensor, "to_local")
            mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            held = self.held(mine)
            local += max(held.values(), default=0)
            whole += tensor.numel() * tensor.element_size()
            for device, size in held.items():
                devices[device] = devices.get(device, 0) + size
        # Fully sharded modules put other tensors into the graph than the ones that their optimizer holds.
        first = sum(leaf.bytes for leaf in self.leaves.values() if leaf.call == 1)
        work = self.spread(self.work or self.forwards)
        described = [
            self.device(device) | {"parameter_bytes": devices.get(device, 0), "work": work.get(device, 0)}
            for device in {*devices, *work}
        ]
        told = [found for _, found in sorted(self.gradients.items()) if found]
        return {
            "framework": "torch",
            "backward_calls": self.calls,
            "trouble": self.trouble,
            "devices": described,
            "parameter_bytes": {"local": local, "global": max(whole, first)},
            "plain_parameters": plain,
            "shapes": sorted(self.shapes)[:256],
            "parameter_shapes": sorted(shapes | {leaf.shape for leaf in self.leaves.values()})[:512],
            "fingerprint": hashlib.sha256("".join(told).encode()).hexdigest()[:16] if told else None,
            "random": len(self.generators) > 1,
            "inputs": self.inputs.hexdigest()[:16] if self.has_inputs else None,
            "rows": {"": self.rows} if self.rows else {},
            "dtypes": {str(dtype).removeprefix("torch."): count for dtype, count in self.dtypes.items()},
            "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            "convolution": self.convolution,
            "matmul_precision": self.matmul_precision(),
            "compiled": self.compiled(),
        }

    def compiled(self):
        """What Dynamo and Inductor did, and how many bytes of parameters are behind it."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return {"graphs": 0}
        guarded = None
        try:
            guarded = sum(each.param_bytes or 0 for each in dynamo.get_compilation_metrics())
        except AttributeError as error:
            self.trouble = f"{type(error).__name__}: {error}"
        return {
            "graphs": self.captured(),
            "calls_captured": int(dynamo.counters["stats"]["calls_captured"]),
            "compiler": "Inductor",
            "compiled": sum(dynamo.counters["inductor"].values()),
            "parameter_bytes": sum(leaf.bytes for leaf in self.leaves.values() if leaf.compiled),
            "reached_bytes": sum(leaf.bytes for leaf in self.leaves.values()),
            "guarded_bytes": guarded,
        }

    def matmul_precision(self):
        """What lowers a float32 product: in the older words, which refuse to answer a mixture, and in the newer."""
        torch = self.torch
        found = {"matmul": "highest", "cudnn_tf32": None}
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 advises against asking, on the script's own standard error
            found["matmul"] = torch.get_float32_matmul_precision()
            if torch.backends.cuda.is_built():
                found["cudnn_tf32"] = bool(torch.backends.cudnn.allow_tf32)
        for key, path in (("cuda", "cuda.matmul"), ("mkldnn", "mkldnn.matmul"), ("cudnn", "cudnn.conv")):
            place = torch.backends
            for name in path.split("."):
                place = getattr(place, name, None)
            found[key] = getattr(place, "fp32_precision", None)
        return found

    def final(self):
        """What is known at the end: graphs, and the device's own peak memory where it counts that."""
        torch = self.torch
        found = {"graphs": self.graphs(), "device_peak_bytes": None, "warm": self.warm(), "gave_up": self.gave_up()}
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            found["device_peak_bytes"] = max(
                torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())
            )
        return found


class Leaf:
    """A parameter that a backward pass reached, as it was then."""

    def __init__(self, variable, shape, compiled, call):
        self.variable = weakref.ref(variable)
        self.shape = shape
        self.compiled = compiled
        self.call = call
        self.bytes = variable.element_size()
        for size in shape:
            self.bytes *= size
