"""Ask PyTorch what it is and which devices it sees; run as a process of its own, prints one JSON line."""

import json


def main():
    import torch

    found = {"version": torch.__version__, "runtime": None, "devices": {"cpu": 1}}
    if torch.cuda.is_available():
        found["runtime"] = "rocm" if torch.version.hip else "cuda"
        found["devices"][found["runtime"]] = torch.cuda.device_count()
        found["kinds"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is not None and accelerator.type != "cuda":
        found["devices"][accelerator.type] = torch.accelerator.device_count()
    print(json.dumps(found))


main()
