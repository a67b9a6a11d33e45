"""Take what a JAX script jits to the compilers of chips that are not here (`chips_jax.py`).

Loaded by `worker.py` beside an unmodified script that runs on forced host devices. Every function that the script jits
and calls from outside a trace (also through `equinox.filter_jit`, as a method, or ahead of time by
`.lower().compile()`) is exported for the target's platform and compiled for its topology at its first call, and again
for every new signature. It is not executed: inputs of the same shape, dtype and sharding, or ones and zeros, stand in
for its results, so that a script can be shown that would neither fit nor end on the host, or whose kernels only its
chip has. For a target without a compiler it is lowered only.

Events, besides the worker's: `compiling` and `compiled` for each program, `refused` with the compiler's words, and
`unable` with the reason why nothing can be shown.

Private names used: `jax._src.core.trace_state_clean`, `jax._src.compiler`, `jax._src.interpreters.mlir`,
`Exported._in_named_shardings`; verified with the versions in `chips_jax.py`.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
import types


def sibling(name):
    """What the Python file beside this one defines."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    namespace = {"__name__": "<inside>", "__file__": path}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    return types.SimpleNamespace(**namespace)


looks, chips = sibling("observe_jax.py"), sibling("chips_jax.py")


def observe(after_import):
    """Arrange to compile once the script imports jax."""
    return Observer(after_import)


class Stop(BaseException):
    """Ends the script where going on shows nothing more; no `except Exception` of the script's takes it."""


class Signature:
    """A jitted function with arguments of certain shapes: what was compiled, and what stands in for its results."""

    def __init__(self, observer, recorded, args, kwargs, options):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.calls = 0
        self.observer, jitted, compiler = observer, recorded.jitted, observer.compiler
        traced = jitted.trace(*args, **kwargs)  # raises what the script's own function raises
        self.info = jax.tree.leaves(traced.out_info)
        self.tree = jax.tree.structure(traced.out_info)
        donated = [each.donated for each in jax.tree.leaves(traced.args_info)]
        platform = compiler.chips.platform
        with chips.refusing():
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
                return observer.real_jit(flat, donate_argnums=donate, compiler_options=options).lower(*leaves)

        def make():
            if not compiler.chips.devices:
                # No compiler of the target's says how results are laid out over devices; the host's propagates alike.
                return None, _specs(jitted.lower(*args, **kwargs).compile()) if self.count > 1 else None
            lowered = lower(compiler.chips.devices)
            with chips.refusing():
                compiled = lowered.compile()
            return compiled.runtime_executable(), _specs(compiled)

        facts = donated, exported.in_shardings_hlo, self.host.shape, options
        content = exported.mlir_module_serialized + str(facts).encode()
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


def _specs(compiled):
    """The partition specs of a compiled function's results as plain data; None for one that has none."""
    import jax

    specs = [getattr(sharding, "spec", None) for sharding in jax.tree.leaves(compiled.output_shardings)]
    return [
        None if spec is None else [list(each) if isinstance(each, tuple) else each for each in spec] for spec in specs
    ]


def _axes(each):
    return tuple(each) if isinstance(each, list) else each


class Recorded:
    """What `jax.jit` gives to a script: inside a trace the jitted function, outside of one what stands in for it."""

    def __init__(self, observer, function, jitted, compiler_options=None):
        self.observer, self.jitted, self.compiler_options = observer, jitted, compiler_options
        functools.update_wrapper(self, function, updated=())
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__wrapped__ = function
        inner = inspect.unwrap(function)
        names = getattr(inner, "__module__", ""), getattr(inner, "__qualname__", str(id(inner)))
        self.identity = *names, getattr(getattr(inner, "__code__", None), "co_firstlineno", 0)

    def __call__(self, *args, **kwargs):
        if self.observer.within_trace(args, kwargs):
            return self.jitted(*args, **kwargs)
        return self.observer.signature(self, args, kwargs, self.compiler_options).results(args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args, **kwargs):
        return AheadOfTime(self, args, kwargs)

    def trace(self, *args, **kwargs):
        if not self.observer.is_working():
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
        options = (self.recorded.compiler_options or {}) | (compiler_options or {})
        self.signature = self.recorded.observer.signature(self.recorded, self.args, self.kwargs, options or None)
        return self

    def __call__(self, *args, **kwargs):
        return self.signature.results(args, kwargs)

    def __getattr__(self, name):
        lowered = self.recorded.jitted.lower(*self.args, **self.kwargs)
        return getattr(lowered if self.signature is None else lowered.compile(), name)


class Observer(looks.Observer):
    """Takes the place of `jax.jit` and, as the observer of executed cells does, says how the work is laid out."""

    def __init__(self, after_import):
        self.finders = [after_import("jax", self.begin), after_import("jax._src.compiler", self.install)]
        self.compiler = self.host = self.task = self.emit = None
        self.programs, self.signatures, self.recorded = [], {}, {}
        self.compilations, self.trouble = 0, None
        self.eager = {}
        self.lock, self.worker = threading.RLock(), None  # the thread that takes a function to the compiler

    def unable(self, reason):
        self.emit("unable", reason=reason)
        raise Stop(reason)

    def begin(self, jax):
        """Replace `jax.jit` in the module that the script gets to see."""
        reason = chips.unverified(jax)
        if reason is not None:
            self.unable(reason)
        import jax.export

        self.real_jit = jax.jit

        def jit(function=None, /, **options):
            if function is None:
                return functools.partial(jit, **options)
            return Recorded(self, function, self.real_jit(function, **options), options.get("compiler_options"))

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
                self.eager[name] = looks.flops(executable)
            return executable

        compiler.compile_or_get_cached = compile_or_get_cached
        self.host = compiler, original

    def remove(self):
        """Nothing is timed here: it stays until the script ends."""

    def graphs(self):
        return len(self.signatures)

    def is_working(self):
        return self.worker == threading.get_ident()

    def within_trace(self, args, kwargs):
        import jax
        from jax._src import core

        leaves = jax.tree.leaves((args, kwargs))
        traced = any(isinstance(each, jax.core.Tracer) for each in leaves)
        return traced or self.is_working() or not core.trace_state_clean()

    def signature(self, recorded, args, kwargs, options=None):
        """The compiled signature that these arguments have, with options of the compiler's."""
        import jax

        leaves, tree = jax.tree.flatten((args, kwargs))
        key = recorded.jitted, tree, tuple(map(_kind, leaves)), str(options)
        with self.lock:
            if key not in self.signatures:
                self.worker = threading.get_ident()
                try:
                    self.signatures[key] = self.shown(recorded, args, kwargs, options)
                finally:
                    self.worker = None
            return self.signatures[key]

    def shown(self, recorded, args, kwargs, options):
        import jax

        recorded.jitted.trace(*args, **kwargs)  # what is wrong with the function itself, the script gets to see
        try:
            self.compiler = self.compiler or chips.Compiler(self.task, self.emit)
            made = Signature(self, recorded, args, kwargs, options)
        except Exception as error:
            chips.told(self.emit, recorded.__name__, error)
            raise Stop(str(error)) from error.__cause__
        self.recorded.setdefault(recorded.identity, []).append((recorded.__name__, made))
        computation, devices = _module(made.exported), list(jax.devices()[: made.count])
        whole = looks.Program(computation, devices, 0.0).whole_flops()
        counted = made.record.get("flops") if self.compiler.chips.platform == "tpu" else None
        self.programs.append(looks.Program(computation, devices, counted or whole / made.count))
        return made

    def rest(self):
        """Compile what has waited, if the source uses all devices."""
        made = [(name, each) for programs in self.recorded.values() for name, each in programs]
        if not any(each.count == self.task["devices"] for _, each in made):
            return
        for name, each in made:
            try:
                each.compile()
            except Exception as error:
                chips.told(self.emit, name, error)
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
