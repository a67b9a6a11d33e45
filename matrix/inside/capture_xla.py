"""Keep the graphs that a PyTorch/XLA script runs, as portable StableHLO, for compilers of other chips.

Loaded by `worker.py` beside an unmodified script that runs on PJRT's CPU; it also says what `observe_xla.py` says. Each
time the script lets pending tensors be computed (`torch_xla.sync`, `mark_step`, a loader), and each time openxla
compiles a graph of Dynamo's, the graph is lowered; every distinct one is written once to the attempt's folder.

Event, besides the worker's: `unable` with the reason why nothing can be captured.

Private names used, besides those of `observe_xla.py`: `torch_xla._XLAC._get_stablehlo`, `_get_graph_hash`,
`_run_cached_graph`, `_xla_get_default_device`, `_xla_step_marker`, `_xla_warm_up_cache`; verified with the versions
below.
"""

import hashlib
import os

VERIFIED = ("2.9.0",)

_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "observe_xla.py")
_names = {"__name__": "<inside>", "__file__": _path}
with open(_path, encoding="utf-8") as _file:
    exec(compile(_file.read(), _path, "exec", dont_inherit=True), _names)


def observe(after_import):
    """Arrange to capture once the script imports torch_xla."""
    return Observer(after_import)


class Observer(_names["Observer"]):
    def __init__(self, after_import):
        super().__init__(after_import)
        self.task = self.emit = None  # set by the worker
        self.graphs_kept = {}  # by content: {"name": ..., "path": ..., "calls": ...}
        self.steps = self.compiled_graphs = 0
        self.by_hash = {}  # openxla's hash of a graph -> what was kept of it

    def install_xla(self, xla):
        super().install_xla(xla)
        version = xla.__version__.partition("+")[0]
        if version not in VERIFIED:
            self.emit("unable", reason=f"not verified with torch_xla {version} (but with {', '.join(VERIFIED)})")
            return
        private = xla._XLAC
        step_marker, warm_up, run = private._xla_step_marker, private._xla_warm_up_cache, private._run_cached_graph

        def _xla_step_marker(*args, **kwargs):
            self.capture([], "step")
            return step_marker(*args, **kwargs)

        def _xla_warm_up_cache(tensors, *args, **kwargs):
            self.by_hash[private._get_graph_hash(tensors)] = self.capture(tensors, "compiled", calls=0)
            return warm_up(tensors, *args, **kwargs)

        def _run_cached_graph(key, *args, **kwargs):
            if (kept := self.by_hash.get(key)) is not None:
                kept["calls"] += 1
            return run(key, *args, **kwargs)

        private._xla_step_marker = _xla_step_marker
        private._xla_warm_up_cache = _xla_warm_up_cache
        private._run_cached_graph = _run_cached_graph

    def capture(self, tensors, kind, calls=1):
        """Lower the graph of some tensors, of all that are pending when there are none, and keep it."""
        private = self.private
        try:
            artifact = private._get_stablehlo(tensors, private._xla_get_default_device(), [], True)
        except RuntimeError as error:
            self.trouble = f"a graph could not be lowered: {error}"
            return None
        digest = hashlib.sha256(artifact).hexdigest()
        kept = self.graphs_kept.get(digest)
        if kept is None:
            if kind == "step":
                self.steps += 1
            else:
                self.compiled_graphs += 1
            number = self.steps if kind == "step" else self.compiled_graphs
            path = os.path.join(self.task["folder"], f"{kind}-{number}.stablehlo")
            with open(path, "wb") as file:
                file.write(artifact)
            kept = self.graphs_kept[digest] = {"name": f"{kind} graph {number}", "path": path, "calls": 0}
        kept["calls"] += calls
        return kept

    def final(self):
        return super().final() | {
            "captured": list(self.graphs_kept.values()),
            "recompiles": max(0, self.steps - 2),  # the first step makes the optimizer's state, the others use it
            "trouble": self.trouble,
        }
