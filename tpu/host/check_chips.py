"""Does JAX see the chips of this TPU host? `check_chips.py 8`; exit status 1 if not."""

import importlib.metadata
import os
import sys

os.environ["JAX_PLATFORMS"] = "tpu,cpu"  # no TPU is an error, not a run on the CPU

import jax  # noqa: E402


def main(expected: int) -> int:
    """Print versions and devices; the exit status."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    names = "jax", "jaxlib", "libtpu"
    print(", ".join(f"{name} {installed.get(name, 'is not installed')}" for name in names))
    try:
        found = jax.local_devices()
    except RuntimeError as error:
        print(f"error: JAX has no TPU: {error}\nsee tpu/README.md, When it fails", file=sys.stderr)
        return 1
    print(f"{len(found)} chips of {found[0].device_kind}; {jax.device_count()} in the slice")
    if len(found) != expected:
        fix = "give --type as it was created"
        print(f"error: this host has {len(found)} chips, not {expected}: {fix}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
