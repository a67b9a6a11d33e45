"""Ask JAX what it is and which devices it sees; run as a process of its own, prints one JSON line."""

import json


def main():
    import jax
    from jax.extend import backend

    found = {"version": jax.__version__, "devices": {}, "kinds": []}
    default = jax.default_backend()  # initialises every platform that is there
    for name, client in backend.backends().items():
        version = client.platform_version.lower()
        kind = next((each for each in ("rocm", "cuda") if each in version), name)
        found["devices"][kind] = client.device_count()
    found["default"] = default
    found["kinds"] = sorted({device.device_kind for device in jax.devices()})
    print(json.dumps(found))


main()
