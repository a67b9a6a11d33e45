"""See where a JAX script's work is done, without touching it: in what XLA was asked to compile and what it made of it.

Every compilation passes `jax._src.compiler.compile_or_get_cached`. It is given the whole computation as the user wrote
it, for all devices together, and returns the executable of one device after partitioning. The ratio of their FLOPs is
the share of the work that one device does: 1/n when it is split over n devices, 1 when it is replicated. Where the
user wrote the per-device program (`shard_map`, `pmap`), the computation says shapes per device instead. Whether the
devices were given different data is seen in the arrays that are alive. After the second progress line the function is
put back; only JAX's own listener for compilations stays.

Private names used (verified with jax 0.10): `jax._src.compiler.compile_or_get_cached`, `jax._src.monitoring`,
`jax._src.xla_bridge.backends_are_initialized`, `jaxlib._jax.mlir` and `hlo_module_cost_analysis`.
Whatever is missing is reported as not seen.
"""

import hashlib
import re
import sys

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHED = "/jax/compilation_cache/cache_hits"
MATMUL = ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution")
PRECISION = re.compile(r"precision<(\w+)>|\b(DEFAULT|HIGHEST|HIGH)\b")
MAX_ROWS, ROW_ELEMENTS = 4096, 8  # of an array whose rows are hashed each: at most, at least
HASHED = 65_536  # elements of an array's shard that are hashed
SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
SHORT |= {"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "i1": "bool"}
SHORT |= {"ui64": "uint64", "ui32": "uint32", "ui16": "uint16", "ui8": "uint8"}


def observe(after_import):
    """Arrange to look once the script imports jax; it need not, and nothing is imported for it."""
    return Observer(after_import)


def shape_of(text):
    """`tensor<96x64xf32>` -> ((96, 64), "f32"); a dynamic size is 0."""
    *sizes, dtype = text.removeprefix("tensor<").removesuffix(">").split("x")
    return tuple(int(size) if size.isdigit() else 0 for size in sizes), dtype


class Program:
    """One compilation: the computation as given, its devices, and the FLOPs of one of them in what was made of it.

    Nothing is read before it has to be.
    """

    def __init__(self, computation, devices, flops):
        self.computation = computation
        main = self.functions()["main"]
        self.name = computation.operation.attributes["sym_name"].value
        self.inputs = [str(each) for each in main.type.inputs]
        self.outputs = [str(each) for each in main.type.results]
        self.devices = devices
        self.flops = flops
        self.found = None

    def functions(self):
        return {
            each.attributes["sym_name"].value: each
            for each in self.computation.body.operations
            if each.operation.name == "func.func"
        }

    @property
    def updates(self):
        """Types that it takes in and gives out: what a training step does with its parameters."""
        return {each for each in self.inputs if each in self.outputs and "x" in each}

    @property
    def products(self):
        """Its matrix products: `(types of operands and result, precision, whether the user wrote it per device)`."""
        if self.found is None:
            self.found, functions, met = [], self.functions(), set()
            # The older partitioner marks per-device code by calls at its borders, and outlines it.
            everywhere = "SPMDFullToShardShape" in str(self.computation)

            def visit(operation, manual):
                for region in operation.regions:
                    for block in region.blocks:
                        for each in block.operations:
                            name = each.operation.name
                            if name in MATMUL:
                                types = [str(value.type) for value in (*each.operands, *each.results)]
                                attributes = each.operation.attributes
                                asked = str(attributes["precision_config"]) if "precision_config" in attributes else ""
                                words = [a or b for a, b in PRECISION.findall(asked)]
                                self.found.append((types, words[0] if words else "DEFAULT", manual or everywhere))
                            elif name in ("func.call", "call"):
                                key = each.operation.attributes["callee"].value, manual
                                if key not in met and key[0] in functions:
                                    met.add(key)
                                    visit(functions[key[0]].operation, manual)
                            visit(each.operation, manual or "manual_computation" in name)

            visit(functions["main"].operation, False)
        return self.found

    @property
    def manual(self):
        """Whether its matrix products are written per device."""
        return any(manual for _, _, manual in self.products)

    def whole_flops(self):
        """FLOPs of the computation over all devices together, before partitioning."""
        from jaxlib import _jax

        text = str(self.computation)
        made = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
        module = made.get_hlo_module() if hasattr(made, "get_hlo_module") else made.as_hlo_module()
        return float(_jax.hlo_module_cost_analysis(self.devices[0].client, module).get("flops", 0.0))


def flops(executable):
    """FLOPs of one device, by the compiler's own count."""
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, (list, tuple)) else costs
    return float((costs or {}).get("flops", 0.0))


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
        self.cached = 0  # compilations that the persistent cache spared
        self.compile_s = 0.0
        self.trouble = None

    def listen(self, monitoring):
        def on_duration(event, duration, **_):
            if event == COMPILED:
                self.compilations += 1
                self.compile_s += duration

        def on_event(event, **_):
            self.cached += event == CACHED

        monitoring.register_event_duration_secs_listener(on_duration)
        monitoring.register_event_listener(on_event)

    def install(self, compiler):
        original = compiler.compile_or_get_cached

        def compile_or_get_cached(backend, computation, *args, **kwargs):
            executable = original(backend, computation, *args, **kwargs)
            try:
                self.programs.append(Program(computation, list(executable.local_devices()), flops(executable)))
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
        """The program that does the training: the heaviest of those that multiply and give out what they take in."""
        heaviest = sorted(self.programs, key=lambda program: -program.flops * len(program.devices))
        wanted = (
            lambda program: program.updates and program.products,
            lambda program: program.products,  # without jit every operation is a program
            lambda program: program.updates,
        )
        for want in wanted:
            found = next((program for program in heaviest if want(program)), None)
            if found is not None:
                return found
        return heaviest[0] if heaviest else None

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
        arrays = self.arrays()
        parameters, whole = self.parameters(arrays, step)
        fed, rows = self.fed(arrays, step)
        devices = [
            self.device(device) | {"parameter_bytes": parameters.get(device, 0), "work": work.get(device, 0.0)}
            for device in {*parameters, *work}
        ]
        manual = step.manual
        share = None
        if len(step.devices) > 1 and not manual:
            try:
                total = step.whole_flops()
                share = step.flops / total if total else None
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
        shapes, dtypes = set(), {}
        for types, asked, inner in step.products:
            if inner == manual:
                shapes |= {shape_of(each)[0] for each in types}
            kind = f"{shape_of(types[0])[1]}/{asked}"
            dtypes[kind] = dtypes.get(kind, 0) + 1
        return {
            "framework": "jax",
            "trouble": self.trouble,
            "program": step.name,
            "devices": devices,
            "parameter_bytes": {
                "local": sum(parameters.values()) / len(step.devices),
                "global": whole,
            },
            "work_share": share,
            "manual": manual,
            "shapes": sorted(shapes)[:256],
            "shapes_over": 1 if manual else len(step.devices),
            "parameter_shapes": sorted({shape_of(each)[0] for each in step.updates})[:512],
            "fed": fed,
            "rows": rows,
            "dtypes": dtypes,
            "parameter_dtypes": sorted({shape_of(each)[1] for each in step.updates}),
            "matmul_precision": {"matmul": str(jax.config.jax_default_matmul_precision)},
            "compiled": {"graphs": self.compilations},
        }

    def arrays(self):
        """The arrays that are alive on any device."""
        from jax.extend import backend

        found = {id(array): array for client in backend.backends().values() for array in client.live_arrays()}
        return [array for array in found.values() if not array.is_deleted()]

    def parameters(self, arrays, step):
        """Bytes of the step's parameters that each device holds now, and of all of them if held once."""
        held, whole = {}, 0
        for array in self.of_types(arrays, step.updates):
            whole += array.nbytes
            for shard in array.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        return held, whole

    def fed(self, arrays, step):
        """By device, a hash of the data that the step gets there, its inputs that it does not give out again; and
        hashes of the rows of each of them that is a batch."""
        import numpy

        found, rows = {}, {}
        for array in self.of_types(arrays, {each for each in step.inputs if "x" in each} - step.updates):
            if array.sharding.is_fully_replicated and len(array.sharding.device_set) > 1:
                continue
            for shard in array.addressable_shards:
                data = numpy.asarray(shard.data)  # to index the array itself would compile a program
                part = data.reshape(-1)[:HASHED]
                if part.size and (part != part[0]).any():
                    found.setdefault(str(shard.device), set()).add(hashlib.sha256(part.tobytes()).hexdigest()[:16])
                if data.ndim > 1 and 2 <= len(data) <= MAX_ROWS and data[0].size >= ROW_ELEMENTS:
                    whole = data.reshape(len(data), -1)[:, :MAX_ROWS]
                    telling = {hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in whole if (row != row[0]).any()}
                    rows.setdefault(str(shard.device), []).append(sorted(telling))
        return {device: " ".join(sorted(hashes)) for device, hashes in found.items()}, rows

    def of_types(self, arrays, types):
        wanted = {(shape, SHORT.get(dtype, dtype)) for shape, dtype in map(shape_of, types)}
        return [array for array in arrays if (array.shape, str(array.dtype)) in wanted]

    def final(self):
        """What is known at the end: compilations, their time, whether all were cached; the device's peak memory."""
        jax = sys.modules.get("jax")
        found = {"graphs": self.compilations, "compile_s": self.compile_s, "device_peak_bytes": None}
        found["warm"] = self.cached >= self.compilations if self.compilations else None
        bridge = sys.modules.get("jax._src.xla_bridge")
        if jax is not None and bridge is not None and bridge.backends_are_initialized():
            peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
            found["device_peak_bytes"] = max((peak for peak in peaks if peak), default=None)
        return found
