"""Compile what a JAX script jits for chips that are not here, with their own compiler.

Loaded by `worker.py` beside an unmodified script that runs on forced host devices. Every function that the script jits
and calls from outside a trace (also through `equinox.filter_jit`, as a method, or ahead of time by
`.lower().compile()`) is exported for the target's platform and compiled for its topology at its first call, and again
for every new signature. It is not executed: inputs of the same shape, dtype and sharding, or ones and zeros, stand in
for its results, so that a script can be shown that would neither fit nor end on the host, or whose kernels only its
chip has. For a target without a compiler it is lowered only.

As a command, `python compile_jax.py SETTINGS.json`, it compiles portable StableHLO artifacts: what another framework
captured.

Events, besides the worker's: `compiling` and `compiled` for each program, `refused` with the compiler's words, and
`unable` with the reason why nothing can be shown.

Private names used: `jax._src.core.trace_state_clean`, `jax._src.compiler`, `jax._src.interpreters.mlir`,
`jaxlib._jax`, `Exported._in_named_shardings`; verified with the versions below.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import time
import types

VERSION = 1  # of what is kept of a compilation
VERIFIED = ("0.10.2",)
KERNELS = re.compile(r"/jax/.*(?:pallas|mosaic|triton)")  # files of the languages that kernels are written in
NO_RULE = re.compile(r"MLIR translation rule for primitive .* not found for platform")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send")

_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "observe_jax.py")
_names = {"__name__": "<inside>", "__file__": _path}
with open(_path, encoding="utf-8") as _file:
    exec(compile(_file.read(), _path, "exec", dont_inherit=True), _names)
Program, Looks = _names["Program"], _names["Observer"]


def observe(after_import):
    """Arrange to compile once the script imports jax."""
    return Observer(after_import)


class Stop(BaseException):
    """Ends the script where going on shows nothing more; no `except Exception` of the script's takes it."""


class Refused(Exception):
    """What the target's lowering rules or its compiler do not take, in their words."""


@contextlib.contextmanager
def refusing():
    """Within, what the target's lowering rules, a kernel language or the compiler say no to is a refusal.

    Anything else that is raised may be no fault but ours: of exporting, or of tracing on a host.
    """
    import jax

    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        where = trace.tb_frame.f_code.co_filename.replace(os.sep, "/")
        if isinstance(error, jax.errors.JaxRuntimeError) or KERNELS.search(where) or NO_RULE.search(str(error)):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


class Chips:
    """The target's devices, and what its compiler is."""

    def __init__(self, task):
        from jax.experimental import topologies

        target = task["target"]
        self.platform, self.slices = target["accelerator"], target["slices"]
        self.compiler, self.devices, self.kind = task["compiler"], [], ""
        if target["name"] == "any":
            return
        if self.platform == "tpu":
            more = {"num_slices": self.slices} if self.slices > 1 else {}
            self.devices = topologies.get_topology_desc(target["name"], "tpu", **more).devices
        else:
            with open(task["config"], encoding="utf-8") as file:
                config = file.read()
            shape = f"1x1x{task['devices']}"
            self.devices = topologies.get_topology_desc("", "cuda", target_config=config, topology=shape).devices
        self.kind = self.devices[0].device_kind


class Compiler:
    """Compiles programs for the target, each content once; results are kept on disk for later runs."""

    def __init__(self, task, emit):
        self.task, self.emit, self.chips = task, emit, Chips(task)
        self.done = {}

    def compile(self, name, content, devices, make):
        """The record of a program, by its content.

        Args:
            name: of the function or graph.
            content: bytes that decide what is compiled, with the target and the compiler.
            devices: how many it runs on.
            make: lowers and compiles it; returns the executable and the partition specs of its outputs.
        """
        facts = [VERSION, hashlib.sha256(content).hexdigest(), devices]
        facts += [self.task["target"]["name"], self.chips.slices, self.chips.compiler]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        path = os.path.join(self.task["cache"], f"{digest}.json")
        found = self.done.get(digest)
        if found is None and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found = {**json.load(file), "cached": True}
        if found is None:
            self.emit("compiling", name=name)
            begin = time.monotonic()
            executable, specs = make()
            found = {"devices": devices, "compile_s": round(time.monotonic() - begin, 3), "specs": specs}
            if executable is not None:
                found |= measures(executable)
                os.makedirs(self.task["cache"], exist_ok=True)
                with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                    json.dump(found, file)
                os.replace(file.name, path)
        self.done[digest] = found
        self.emit("compiled", name=name, kind=self.chips.kind)
        return found


def measures(executable):
    """What an executable says of itself: memory and costs of one device, collectives, loops."""
    import jax
    from jaxlib import _jax

    memory = executable.get_compiled_memory_stats()
    module = executable.hlo_modules()[0]
    costs = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    text = module.to_string()
    collectives = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    own = memory.argument_size_in_bytes - memory.alias_size_in_bytes  # what is donated becomes an output
    return {
        "collectives": {name: count for name, count in collectives.items() if count},
        "peak_bytes": own + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "flops": costs.get("flops"),
        "bytes": costs.get("bytes accessed"),
        "scans_counted_once": len(re.findall(r" while\(", text)),
    }


class Signature:
    """A jitted function with arguments of certain shapes: what was compiled, and what stands in for its results."""

    def __init__(self, observer, recorded, args, kwargs):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.calls = 0
        self.observer, jitted, compiler = observer, recorded.jitted, observer.compiler
        traced = jitted.trace(*args, **kwargs)  # raises what the script's own function raises
        self.info = jax.tree.leaves(traced.out_info)
        self.tree = jax.tree.structure(traced.out_info)
        donated = [each.donated for each in jax.tree.leaves(traced.args_info)]
        platform = compiler.chips.platform
        with refusing():
            exported = jax.export.export(jitted, platforms=[platform])(*args, **kwargs)
        self.count = exported.nr_devices
        self.committed = any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves((args, kwargs)))
        self.host = self.mesh_of(exported, args, kwargs)

        def lower(devices):
            names, shape = self.host.axis_names, self.host.devices.shape
            mesh = Mesh(_grid(devices[: self.count], shape), names, axis_types=self.host.axis_types)
            shardings = exported.in_shardings_jax(mesh)
            whole = NamedSharding(mesh, PartitionSpec())
            leaves = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if sharding is not None else whole)
                for aval, sharding in zip(exported.in_avals, shardings, strict=True)
            ]

            def flat(*leaves):
                args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
                return exported.call(*args, **kwargs)

            flat.__name__ = recorded.__name__
            donate = tuple(index for index, each in enumerate(donated) if each)
            # Where the script has set its mesh for a whole block, the target's takes its place.
            within = contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(mesh)
            with within:
                return observer.real_jit(flat, donate_argnums=donate).lower(*leaves)

        def make():
            if not compiler.chips.devices:
                return None, None
            lowered = lower(compiler.chips.devices)
            with refusing():
                compiled = lowered.compile()
            specs = [_spec(each) for each in jax.tree.leaves(compiled.output_shardings)]
            return compiled.runtime_executable(), specs

        content = exported.mlir_module_serialized + str((donated, exported.in_shardings_hlo, self.host.shape)).encode()
        self.exported = exported
        self.record = {"devices": self.count}
        self.finish = lambda: compiler.compile(recorded.__name__, content, self.count, make)
        specs = [None] * len(self.info)
        if self.count > 1 or observer.task["devices"] == 1:
            specs = self.compile() or specs
        self.shardings = [NamedSharding(self.host, PartitionSpec(*map(_axes, spec or ()))) for spec in specs]

    def compile(self):
        """Compile it, if it is not; returns the partition specs of its results.

        A function on one of several devices waits: if nothing uses all of them, the source shows nothing anyway.
        """
        finish, self.finish = self.finish, None
        if finish is not None:
            self.record = finish()
        return self.record.get("specs")

    def mesh_of(self, exported, args, kwargs):
        """The script's own mesh of host devices: what its arrays are laid on, or its function speaks of."""
        import jax
        from jax.sharding import Mesh

        laid = [leaf.sharding.mesh for leaf in jax.tree.leaves((args, kwargs)) if _is_named(leaf)]
        for mesh in laid:
            if mesh.size == self.count:
                return mesh
        said = [each.mesh for each in (*exported._in_named_shardings, *exported._out_named_shardings) if each]
        host = jax.devices()[: self.count]
        for mesh in said:
            if mesh.size == self.count:
                return Mesh(_grid(host, tuple(mesh.shape.values())), mesh.axis_names, axis_types=mesh.axis_types)
        return Mesh(_grid(host, (self.count,)), ("all",))

    def results(self, args, kwargs):
        """Arrays that stand in for what the function would give."""
        import jax

        self.calls += 1
        pool = {}
        for leaf in jax.tree.leaves((args, kwargs)):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                pool.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
        found = []
        for each, sharding in zip(self.info, self.shardings, strict=True):
            like = [
                leaf
                for leaf in pool.get((each.shape, each.dtype), ())
                if self.count == 1 or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            ]
            found.append(like[0] if like else self.made(each, sharding))
            if like:  # each once: two parameters are not one
                pool[each.shape, each.dtype] = [leaf for leaf in pool[each.shape, each.dtype] if leaf is not like[0]]
        return jax.tree.unflatten(self.tree, found)

    def made(self, each, sharding):
        import jax
        import numpy

        if jax.dtypes.issubdtype(each.dtype, jax.dtypes.prng_key):
            value = jax.numpy.broadcast_to(jax.random.key(0), each.shape)
        else:
            one = jax.numpy.issubdtype(each.dtype, jax.numpy.inexact)
            value = numpy.full(each.shape, 1 if one else 0, each.dtype)
        if self.count > 1:
            return jax.device_put(value, sharding)
        return jax.device_put(value, jax.devices()[0]) if self.committed else jax.numpy.asarray(value)


def _grid(devices, shape):
    import numpy

    return numpy.array(devices).reshape(shape)


def _is_named(leaf):
    return hasattr(getattr(leaf, "sharding", None), "mesh") and hasattr(leaf.sharding.mesh, "devices")


def _spec(sharding):
    """A sharding's partition spec as plain data; None where it has none."""
    spec = getattr(sharding, "spec", None)
    return None if spec is None else [list(each) if isinstance(each, tuple) else each for each in spec]


def _axes(each):
    return tuple(each) if isinstance(each, list) else each


class Recorded:
    """What `jax.jit` gives to a script: inside a trace the jitted function, outside of one what stands in for it."""

    def __init__(self, observer, function, jitted):
        self.observer, self.jitted = observer, jitted
        functools.update_wrapper(self, function, updated=())
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__wrapped__ = function
        inner = inspect.unwrap(function)
        names = getattr(inner, "__module__", ""), getattr(inner, "__qualname__", str(id(inner)))
        self.identity = *names, getattr(getattr(inner, "__code__", None), "co_firstlineno", 0)

    def __call__(self, *args, **kwargs):
        if self.observer.within_trace(args, kwargs):
            return self.jitted(*args, **kwargs)
        return self.observer.signature(self, args, kwargs).results(args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args, **kwargs):
        return AheadOfTime(self, args, kwargs)

    def trace(self, *args, **kwargs):
        if not self.observer.working:
            self.observer.unable("jax.jit(...).trace() is not followed")
        return self.jitted.trace(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.jitted, name)


class AheadOfTime:
    """A lowered function of the script's, and once `compile` was called, the compiled one."""

    def __init__(self, recorded, args, kwargs):
        self.recorded, self.args, self.kwargs = recorded, args, kwargs
        self.signature = None

    def compile(self, compiler_options=None):
        self.signature = self.recorded.observer.signature(self.recorded, self.args, self.kwargs)
        return self

    def __call__(self, *args, **kwargs):
        return self.signature.results(args, kwargs)

    def __getattr__(self, name):
        lowered = self.recorded.jitted.lower(*self.args, **self.kwargs)
        return getattr(lowered if self.signature is None else lowered.compile(), name)


class Observer(Looks):
    """Takes the place of `jax.jit` and, as the observer of executed cells does, says how the work is laid out."""

    def __init__(self, after_import):
        self.finders = [after_import("jax", self.begin), after_import("jax._src.compiler", self.install)]
        self.compiler = self.host = self.task = self.emit = None
        self.programs, self.signatures, self.recorded = [], {}, {}
        self.compilations, self.trouble, self.working = 0, None, False
        self.eager = {}

    def unable(self, reason):
        self.emit("unable", reason=reason)
        raise Stop(reason)

    def begin(self, jax):
        """Replace `jax.jit` in the module that the script gets to see."""
        if jax.__version__ not in VERIFIED:
            self.unable(f"not verified with jax {jax.__version__} (but with {', '.join(VERIFIED)})")
        import jax.export

        self.real_jit = jax.jit

        def jit(function=None, /, **options):
            if function is None:
                return functools.partial(jit, **options)
            return Recorded(self, function, self.real_jit(function, **options))

        functools.update_wrapper(jit, self.real_jit)
        jax.jit = jit
        jax.pmap = lambda *args, **kwargs: lambda *_, **__: self.unable("jax.pmap is not followed")

    def install(self, compiler):
        """Take note of the work that the host does although the script jitted nothing for it."""
        original = compiler.compile_or_get_cached

        def compile_or_get_cached(backend, computation, *args, **kwargs):
            executable = original(backend, computation, *args, **kwargs)
            if backend.platform == "cpu":
                name = computation.operation.attributes["sym_name"].value
                self.eager[name] = _names["flops"](executable)
            return executable

        compiler.compile_or_get_cached = compile_or_get_cached
        self.host = compiler, original

    def remove(self):
        """Nothing is timed here: it stays until the script ends."""

    def graphs(self):
        return len(self.signatures)

    def within_trace(self, args, kwargs):
        import jax
        from jax._src import core

        leaves = jax.tree.leaves((args, kwargs))
        return self.working or not core.trace_state_clean() or any(isinstance(each, jax.core.Tracer) for each in leaves)

    def signature(self, recorded, args, kwargs):
        """The compiled signature that these arguments have."""
        import jax

        leaves, tree = jax.tree.flatten((args, kwargs))
        key = recorded.jitted, tree, tuple(map(_kind, leaves))
        if key not in self.signatures:
            self.working = True
            try:
                if self.compiler is None:
                    self.compiler = Compiler(self.task, self.emit)
                self.signatures[key] = self.shown(recorded, args, kwargs)
            finally:
                self.working = False
        return self.signatures[key]

    def shown(self, recorded, args, kwargs):
        import jax

        recorded.jitted.trace(*args, **kwargs)  # what is wrong with the function itself, the script gets to see
        try:
            made = Signature(self, recorded, args, kwargs)
        except Refused as error:
            self.emit("refused", name=recorded.__name__, message=str(error))
            raise Stop(str(error)) from error.__cause__
        except Exception as error:
            self.unable(f"{recorded.__name__} cannot be taken to other chips: {type(error).__name__}: {error}")
        self.recorded.setdefault(recorded.identity, []).append((recorded.__name__, made))
        computation = _module(made.exported)
        whole = Program(computation, list(jax.devices()[: made.count]), 0.0).whole_flops()
        counted = made.record.get("flops") if self.compiler.chips.platform == "tpu" else None
        self.programs.append(Program(computation, list(jax.devices()[: made.count]), counted or whole / made.count))
        return made

    def rest(self):
        """Compile what has waited, if the source uses all devices."""
        made = [(name, each) for programs in self.recorded.values() for name, each in programs]
        if not any(each.count == self.task["devices"] for _, each in made):
            return
        for name, each in made:
            try:
                each.compile()
            except Refused as error:
                self.emit("refused", name=name, message=str(error))
                return

    def final(self):
        if self.compiler is not None and sys.exc_info()[0] is None:  # the script came to its own end
            self.rest()
        functions = [
            {k: v for k, v in made.record.items() if k != "specs"} | {"name": name, "calls": made.calls}
            for programs in self.recorded.values()
            for name, made in programs
        ]
        heaviest = max((program.flops * len(program.devices) for program in self.programs), default=0.0)
        eager = [name for name, flops in self.eager.items() if flops > heaviest]
        return {
            "graphs": len(functions),
            "functions": functions,
            "recompiles": sum(len(programs) - 1 for programs in self.recorded.values()),
            "eager": eager,
            "device_peak_bytes": None,
        }


def _kind(leaf):
    """What of an argument decides whether a jitted function is compiled anew."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
        return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), sharding
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf), leaf  # a static argument may hang on the value
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


def _module(exported):
    """The exported program as an MLIR module."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse(exported.mlir_module())


def compile_artifacts(task):
    """Compile portable StableHLO artifacts of another framework; what happens goes to the folder's events."""
    import jax
    import numpy
    from jax._src import compiler as jax_compiler
    from jax._src.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir.dialects import stablehlo

    def emit(event, **fields):
        with open(os.path.join(task["folder"], "rank-0.events"), "a", encoding="utf-8") as file:
            print(json.dumps({"event": event, "time": time.monotonic(), **fields}), file=file)

    emit("start", pid=os.getpid(), host=os.uname().nodename)
    if jax.__version__ not in VERIFIED:
        emit("unable", reason=f"not verified with jax {jax.__version__} (but with {', '.join(VERIFIED)})")
        return
    compiler, functions, count = Compiler(task, emit), [], task["devices"]
    devices = compiler.chips.devices[:count]

    def make(content):
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, content)
        options = jax_compiler.get_compile_options(
            num_replicas=1, num_partitions=count, device_assignment=numpy.array([[each.id for each in devices]])
        )
        options.executable_build_options.use_shardy_partitioner = False  # Torch/XLA marks shardings the GSPMD way
        with refusing():
            return devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options), None

    for artifact in task["artifacts"]:
        with open(artifact["path"], "rb") as file:
            content = file.read()
        try:
            record = compiler.compile(artifact["name"], content, count, functools.partial(make, content))
        except Refused as error:
            emit("refused", name=artifact["name"], message=str(error))
            return
        except Exception as error:
            emit("unable", reason=f"{artifact['name']} cannot be compiled here: {type(error).__name__}: {error}")
            return
        record = {k: v for k, v in record.items() if k != "specs"}
        functions.append(record | {"name": artifact["name"], "calls": artifact.get("calls", 1)})
    emit("end", functions=functions, recompiles=task.get("recompiles", 0), eager=[])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as _file:
        compile_artifacts(json.load(_file))
