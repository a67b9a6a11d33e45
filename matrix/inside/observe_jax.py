"""See where a JAX script's work is done, without touching it: in what XLA was asked to compile and what it made of it.

Every compilation passes `jax._src.compiler.compile_or_get_cached`. It is given the whole computation as the user wrote
it, for all devices together, and returns the executable of one device after partitioning. The ratio of their FLOPs is
the share of the work that one device does: 1/n when it is split over n devices, 1 when it is replicated. Where the
user wrote the per-device program (`shard_map`, `pmap`), the computation says shapes per device instead. After the
second progress line the function is put back; only JAX's own listener for compilations stays.

Private names used (verified with jax 0.6 to 0.10): `jax._src.compiler.compile_or_get_cached`, `jaxlib._jax.mlir`,
`hlo_module_cost_analysis`. Whatever is missing is reported as not seen.
"""

import re
import sys

COMPILED = "/jax/core/compile/backend_compile_duration"
MAX_TEXT = 50_000_000  # characters of StableHLO that are searched
DOT = re.compile(r"stablehlo\.(dot_general|convolution)\b[^\n]*")
PRECISION = re.compile(r"precision(?:_config)? = \[(?:#stablehlo<precision )?(\w+)")
OPERANDS = re.compile(r": \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>")


def observe(after_import):
    """Arrange to look once the script imports jax; it need not, and nothing is imported for it."""
    return Observer(after_import)


def shape_of(text):
    """`96x64xf32` -> ((96, 64), "f32"); a dynamic size is 0."""
    *sizes, dtype = text.split("x")
    return tuple(int(size) if size.isdigit() else 0 for size in sizes), dtype


class Program:
    """One compilation: the computation as given, and the executable made of it."""

    def __init__(self, computation, executable):
        self.executable = executable
        self.text = str(computation)[:MAX_TEXT]
        main = next(
            each
            for each in computation.body.operations
            if each.operation.name == "func.func" and each.attributes["sym_name"].value == "main"
        )
        self.inputs = [str(each) for each in main.type.inputs]
        self.outputs = [str(each) for each in main.type.results]
        self.devices = list(executable.local_devices())
        costs = executable.cost_analysis()
        costs = costs[0] if isinstance(costs, (list, tuple)) else costs
        self.flops = float((costs or {}).get("flops", 0.0))

    @property
    def updates(self):
        """Types that it takes in and gives out: what a training step does with its parameters."""
        return {each for each in self.inputs if each in self.outputs and "x" in each}

    @property
    def manual(self):
        return "manual_computation" in self.text or "SPMDFullToShardShape" in self.text

    def whole_flops(self):
        """FLOPs of the computation over all devices together, before partitioning."""
        from jaxlib import _jax

        made = _jax.mlir.mlir_module_to_xla_computation(self.text, use_tuple_args=False, return_tuple=False)
        module = made.get_hlo_module() if hasattr(made, "get_hlo_module") else made.as_hlo_module()
        return float(_jax.hlo_module_cost_analysis(self.executable.client, module)["flops"])


class Observer:
    def __init__(self, after_import):
        self.finders = [
            after_import("jax._src.compiler", self.install),
            after_import("jax._src.monitoring", self.listen),
        ]
        self.enough = None  # set by the worker; here the second progress line is early enough
        self.compiler = None
        self.programs = []
        self.compilations = 0
        self.compile_s = 0.0
        self.trouble = None

    def listen(self, monitoring):
        def on_duration(event, duration, **_):
            if event == COMPILED:
                self.compilations += 1
                self.compile_s += duration

        monitoring.register_event_duration_secs_listener(on_duration)

    def install(self, compiler):
        original = compiler.compile_or_get_cached

        def compile_or_get_cached(backend, computation, *args, **kwargs):
            executable = original(backend, computation, *args, **kwargs)
            try:
                self.programs.append(Program(computation, executable))
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            return executable

        compiler.compile_or_get_cached = compile_or_get_cached
        self.compiler = compiler, original

    def remove(self):
        for finder in self.finders:
            finder.remove()
        if self.compiler is not None:
            compiler, original = self.compiler
            compiler.compile_or_get_cached = original
            self.compiler = None
        self.programs.clear()

    def graphs(self):
        """Programs compiled so far."""
        return self.compilations

    def step(self):
        """The program that does the training: the heaviest of those that give out what they take in."""
        candidates = [program for program in self.programs if program.updates] or self.programs
        return max(candidates, key=lambda program: program.flops * len(program.devices), default=None)

    def device(self, device):
        """A device in the words that an accelerator's `owns` reads."""
        from jax.extend import backend

        version = device.client.platform_version.lower()
        runtime = next((name for name in ("rocm", "cuda") if name in version), None)
        return {
            "platform": device.platform,
            "names": [name for name, client in backend.backends().items() if client is device.client],
            "index": device.id,
            "runtime": runtime if device.platform == "gpu" else None,
            "id": f"{device.platform}:{device.id}",
            "kind": device.device_kind,
        }

    def seen(self):
        """What was seen until now, as plain data; see `matrix.truth` for how it is read."""
        jax = sys.modules.get("jax")
        if jax is None:
            return {"framework": None}
        step = self.step()
        if step is None:
            return {"framework": "jax", "trouble": self.trouble, "devices": []}
        like = [each for each in self.programs if each.flops >= step.flops / 2 and (each is step or each.updates)]
        work = {}
        for program in like:
            for device in program.devices:
                work[device] = work.get(device, 0.0) + program.flops
        parameters, whole = self.parameters(jax, step)
        devices = [
            self.device(device) | {"parameter_bytes": parameters.get(device, 0), "work": work.get(device, 0.0)}
            for device in {*parameters, *work}
        ]
        share = None
        if len(step.devices) > 1 and not step.manual:
            try:
                total = step.whole_flops()
                share = step.flops / total if total else None
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
        shapes, dtypes = set(), {}
        for found in DOT.finditer(step.text):
            operands = OPERANDS.search(found.group())
            if operands is None:
                continue
            named = PRECISION.search(found.group())
            for operand in operands.groups():
                shapes.add(shape_of(operand)[0])
            kind = f"{shape_of(operands.group(1))[1]}/{named.group(1) if named else 'DEFAULT'}"
            dtypes[kind] = dtypes.get(kind, 0) + 1
        updates = {shape_of(each.removeprefix("tensor<").removesuffix(">"))[0] for each in step.updates}
        return {
            "framework": "jax",
            "trouble": self.trouble,
            "program": step.text.split("@", 1)[-1].split(" ", 1)[0],
            "devices": devices,
            "parameter_bytes": {"local": max(parameters.values(), default=0), "global": whole},
            "work_share": share,
            "manual": step.manual,
            "shapes": sorted(shapes)[:64] if step.manual or len(step.devices) == 1 else [],
            "parameter_shapes": sorted(updates)[:512],
            "fingerprint": None,
            "dtypes": dtypes,
            "parameter_dtypes": sorted(
                {shape_of(each.removeprefix("tensor<").removesuffix(">"))[1] for each in step.updates}
            ),
            "matmul_precision": {"matmul": str(jax.config.jax_default_matmul_precision)},
            "compiled": {"graphs": self.compilations},
        }

    def parameters(self, jax, step):
        """Bytes of the step's parameters that each device holds now, and of all of them if held once."""
        from jax.extend import backend

        held, whole = {}, 0
        arrays = {id(array): array for client in backend.backends().values() for array in client.live_arrays()}
        for array in arrays.values():
            dtype = str(array.dtype)
            if array.is_deleted() or not any(self.matches(array, dtype, each) for each in step.updates):
                continue
            whole += array.nbytes
            for shard in array.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        return held, whole

    def matches(self, array, dtype, wanted):
        shape, kind = shape_of(wanted.removeprefix("tensor<").removesuffix(">"))
        return array.shape == shape and dtype in (kind, SHORT.get(kind))

    def final(self):
        """What is known at the end: compilations and their time, and the device's own peak memory."""
        jax = sys.modules.get("jax")
        found = {"graphs": self.compilations, "compile_s": self.compile_s, "device_peak_bytes": None}
        bridge = sys.modules.get("jax._src.xla_bridge")
        if jax is not None and bridge is not None and bridge.backends_are_initialized():
            peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
            found["device_peak_bytes"] = max((peak for peak in peaks if peak), default=None)
        return found


SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
