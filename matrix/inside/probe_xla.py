"""Ask PyTorch/XLA what it is and which devices it sees; run as a process of its own, prints one JSON line."""

import json
import os


def main():
    os.environ.pop("PJRT_DEVICE", None)  # else it sees only what that names; without it, a TPU where there is one
    import torch_xla
    from torch_xla import runtime

    found = {"version": torch_xla.__version__, "devices": {"cpu": 1}, "kinds": []}
    platform = runtime.device_type().lower()
    found["devices"][platform] = runtime.addressable_device_count()
    found["kinds"] = [torch_xla._XLAC._xla_device_kind(str(torch_xla.device()))]
    print(json.dumps(found))


main()
