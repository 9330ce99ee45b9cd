"""The delta rule of one layer, compiled for a TPU: the temporaries of each implementation.

    JAX_PLATFORMS=cpu python -m benchmarks.delta_rule [--topology=v5e:2x2] [--tokens=8192]

One row, in float32, of Qwen3.5-9B's heads: 16 of keys, 32 of values, 128 wide. Needs libtpu, and no
TPU. Printed: temporaries of the outputs alone and of the gradient by all inputs, and the largest
array that has a chunk's length twice.

Claim: with the kernel no array has it.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ahead_of_time
from jaxrl.models.delta_rule import CHUNK
from jaxrl.models.kernels.delta_rule import DELTA_RULE

MIB = 2**20


def inputs(device: Any, tokens: int, keys: int, values: int, width: int) -> tuple[Any, ...]:
    """Return the shapes of q, k, v, log_decay, strength and segments of a row on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, *shape), jnp.float32, sharding=sharding)

    q, v, of_value = array(keys, width), array(values, width), array(values)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=sharding)
    return q, q, v, of_value, of_value, ids


def gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what differentiates the outputs of an implementation by all that is not an id."""

    def pulled_back(g: Any, ids: Any, *given: Any) -> Any:
        return jax.vjp(lambda *given: run(*given, ids)[0], *given)[1](g)

    return pulled_back


def squares(text: str) -> int:
    """Return the bytes of the largest array whose last two dims are a chunk's length."""
    shapes = re.findall(rf"f32\[((?:\d+,)*{CHUNK},{CHUNK})\]", text)
    return max((4 * int(np.prod([int(n) for n in s.split(",")])) for s in shapes), default=0)


def compiled(run: Callable[..., Any], given: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of temporaries and of the largest square of a program."""
    program = jax.jit(run).lower(*given).compile()
    return program.memory_analysis().temp_size_in_bytes, squares(program.as_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where the claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args(argv)
    device = ahead_of_time.topology_devices(arguments.topology)[0]
    given = inputs(device, arguments.tokens, keys=16, values=32, width=128)
    *by_token, ids = given
    found = 0
    for name in DELTA_RULE.order["tpu"]:
        run = DELTA_RULE.implementations[name].run
        for what, of, arrays in (
            ("outputs", run, given),
            ("gradient", gradient(run), (given[2], ids, *by_token)),
        ):
            temporaries, square = compiled(of, arrays)
            print(
                f"{name:<8}{what:<10}temporaries {temporaries / MIB:>7,.0f} MiB, largest square "
                f"{square / MIB:>5,.0f} MiB",
                flush=True,
            )
            found = max(found, square) if name == "pallas" else found
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
