"""Compilers of chips that are not here: a program in; out what its executable says of itself, or a refusal.

Used by `compile_jax.py`, which takes the programs from a JAX script. As a command, `python chips_jax.py SETTINGS.json`,
it compiles portable StableHLO artifacts: what another framework captured. Standard library and jax only.

Private names used: `jax._src.compiler`, `jax._src.interpreters.mlir`, `jaxlib._jax`; verified with the versions below.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import time

VERSION = 2  # of what is kept of a compilation
VERIFIED = ("0.10.2",)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send")
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_")  # variables that compilers read

# A compiler calls other programs, and writes files: what speaks of those speaks of this machine.
MACHINE = re.compile(
    r"No space left|Disk quota|Read-only file system|Permission denied|No such file|Too many open files|"
    r"Cannot allocate memory|bad_alloc|ptxas too old|(?:libdevice|ptxas|nvlink|nvjitlink)\b.{0,40} not found"
)
# What is said of the program, by status code; of memory, if it is the chip's.
PROGRAM = re.compile(
    r"^(?:UNIMPLEMENTED|INVALID_ARGUMENT)\b|"
    r"^RESOURCE_EXHAUSTED\b.*(?:hbm|[sv]mem|memory space|(?:device|shared|scoped) memory)|"
    r"Mosaic|ptxas .*error +:",
    re.IGNORECASE | re.DOTALL,
)
NO_RULE = re.compile(r"MLIR translation rule for primitive .* not found for platform")
KERNELS = re.compile(r"/jax/.*(?:pallas|mosaic|triton)")  # files of the languages that kernels are written in


def unverified(jax):
    """Why this version of jax is not used; None for one that was tried."""
    if jax.__version__ in VERIFIED:
        return None
    return f"not verified with jax {jax.__version__} (but with {', '.join(VERIFIED)})"


class Refused(Exception):
    """What the target's lowering rules or its compiler do not take, in their words."""


@contextlib.contextmanager
def refusing():
    """Within, what the target's lowering rules, a kernel language or the compiler say no to is a refusal.

    Anything else that is raised may be no fault of the program's: of exporting, of tracing on a host, of the tool chain
    (an assembler that is missing), of the machine (a full disk).
    """
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


def is_refusal(error):
    """Whether an error of lowering or compiling speaks of the program."""
    import jax

    words = str(error)
    if MACHINE.search(words) or isinstance(error, (ImportError, MemoryError, OSError)):
        return False
    if isinstance(error, jax.errors.JaxRuntimeError):
        return PROGRAM.search(words) is not None
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_code.co_filename.replace(os.sep, "/")
    return KERNELS.search(where) is not None or NO_RULE.search(words) is not None


def told(emit, name, error):
    """Say why a program was not compiled: refused, or unable to tell, in which case the first line has the reason."""
    if isinstance(error, Refused):
        emit("refused", name=name, message=str(error))
    else:
        line = next(iter(str(error).splitlines()), "")
        emit("unable", reason=f"{name} cannot be compiled here: {type(error).__name__}: {line}")


class Chips:
    """The target's devices, and what its compiler is."""

    def __init__(self, task):
        from jax.experimental import topologies

        target = task["target"]
        self.platform, self.slices = target["accelerator"], target["slices"]
        self.compiler, self.config, self.devices, self.kind = task["compiler"], "", [], ""
        if target["name"] == "any":
            return
        if self.platform == "tpu":
            more = {"num_slices": self.slices} if self.slices > 1 else {}
            self.devices = topologies.get_topology_desc(target["name"], "tpu", **more).devices
        else:
            with open(task["config"], encoding="utf-8") as file:
                self.config = file.read()
            described = {"target_config": self.config, "topology": f"1x1x{task['devices']}"}
            self.devices = topologies.get_topology_desc("", "cuda", **described).devices
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
            content: bytes that decide what is compiled, with the target, the compiler and its settings.
            devices: how many it runs on.
            make: lowers and compiles it; returns the executable, None if it only lowers, and the partition specs
                of its outputs.
        """
        facts = [VERSION, hashlib.sha256(content).hexdigest(), devices]
        facts += [self.task["target"]["name"], self.chips.slices, self.chips.config, self.chips.compiler, settings()]
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
            found = {"devices": devices, "specs": specs}
            if executable is not None:
                found |= {"compile_s": round(time.monotonic() - begin, 3), **measures(executable)}
                os.makedirs(self.task["cache"], exist_ok=True)
                with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                    json.dump(found, file)
                os.replace(file.name, path)
        self.done[digest] = found
        self.emit("compiled", name=name, kind=self.chips.kind)
        return found


def settings():
    """What a person may have set that decides how a program is compiled: variables, and options of jax's."""
    import jax

    variables = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    return [sorted(variables.items()), sorted((name, repr(value)) for name, value in jax.config.values.items())]


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
    reason = unverified(jax)
    if reason is not None:
        emit("unable", reason=reason)
        return
    functions, count = [], task["devices"]

    def make(content):
        devices = compiler.chips.devices[:count]
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, content)
        options = jax_compiler.get_compile_options(
            num_replicas=1, num_partitions=count, device_assignment=numpy.array([[each.id for each in devices]])
        )
        options.executable_build_options.use_shardy_partitioner = False  # Torch/XLA marks shardings the GSPMD way
        with refusing():
            return devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options), None

    compiler = None
    for artifact in task["artifacts"]:
        try:
            compiler = compiler or Compiler(task, emit)
            with open(artifact["path"], "rb") as file:
                content = file.read()
            record = compiler.compile(artifact["name"], content, count, functools.partial(make, content))
        except Exception as error:
            told(emit, artifact["name"], error)
            return
        record = {k: v for k, v in record.items() if k != "specs"}
        functions.append(record | {"name": artifact["name"], "calls": artifact.get("calls", 1)})
    emit("end", functions=functions, recompiles=task.get("recompiles", 0), eager=[])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as _file:
        compile_artifacts(json.load(_file))
