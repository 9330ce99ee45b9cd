"""Many models of a training service together against one after another, and the price for one.

    JAX_PLATFORMS=cpu python -m benchmarks.tinker [--tenants 1 4 16] [--json=FILE]
    JAX_PLATFORMS=cpu python -m benchmarks.tinker --shape=smollm2-135m --rounds=1 --tokens=16

A model of about 3 million parameters, or another of `benchmarks/shapes.py`, with random weights
and adapters of rank 16 at all matrices and the head. Each tenant sends a call of 8 sequences of 100
to 200 tokens and an update, again and again; the numbers are of the device side alone, without HTTP
and journal, the fastest of some rounds.

    together       tokens/s of all tenants whose tiles share programs
    in turns       tokens/s of the same calls, one tenant's after another's
    update alone   tokens/s of `jaxrl.sft`'s update of the same batch, with adapters of the same
                   rank: what one tenant would have by itself
    decoding       tokens/s of 64 samples of `--tokens`, of the base in an engine without places
                   for adapters, and of as many adapters, together and in turns

Claim: the table of docs/tinker.md. Bits of each tenant are compared with those it has alone.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models.lora import LoraConfig, abstract_params_of_lora, attach, select_modules
from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import Placement, ShardingRules, make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Adapter, Request, Sampling
from jaxrl.tools.tinker.tenants import Adam, Tenants, new_tenant
from jaxrl.tools.tinker.tiles import Datum, Tile, cut
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import ModelRows

RANK, SEQUENCES = 16, 8


def data_of(seed: int, vocabulary: int) -> list[Datum]:
    """Draw the sequences of a call."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(SEQUENCES):
        length = int(rng.integers(100, 201))
        tokens = rng.integers(0, vocabulary, length + 1).astype(np.int32)
        weights = np.full(length, 1 / length, np.float32)
        found.append(Datum(tokens[:-1], tokens[1:], {"weights": weights}))
    return found


def adapters_of(model: TransformerConfig) -> LoraConfig:
    """Return adapters at all matrices."""
    return LoraConfig(
        model, select_modules(model, ["all-linear", "lm_head"]), rank=RANK, alpha=RANK
    )


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the least time of some runs."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return min(times)


def training(model: TransformerConfig, tenants: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measure calls and updates of some numbers of tenants."""
    placement = Placement(make_mesh(devices=jax.devices()[:1]), ShardingRules())
    lora = adapters_of(model)
    base, names = init_params(model, 0), set(abstract_params_of_lora(lora))
    forward = functools.partial(log_probs_and_entropy, model, temperature=1.0, dtype=jnp.float32)
    service = Tenants(forward, base, lora, placement, max(tenants))
    for slot in range(max(tenants)):
        service.put(slot, new_tenant(lora, slot, RANK, 32.0, names))
    calls = [data_of(slot, model.vocab_size) for slot in range(max(tenants))]
    tiles = [
        cut(data, "cross_entropy", {}, slot=slot, rows=1, full=512)[0]
        for slot, data in enumerate(calls)
    ]
    sizes = [sum(len(d.tokens) for d in data) for data in calls]

    def together(number: int) -> None:
        service.run([tile for some in tiles[:number] for tile in some], learns=True)
        for slot in range(number):
            service.update(slot, Adam(0.0))

    def in_turns(number: int) -> None:
        for slot in range(number):
            service.run(tiles[slot], learns=True)
            service.update(slot, Adam(0.0))

    alone = plain_update(forward, base, lora, tiles[0])
    for compiles in (alone, functools.partial(in_turns, 1)):
        compiles()
    rows = []
    for number in tenants:
        tokens = sum(sizes[:number])
        rows.append(
            {
                "tenants": number,
                "together": tokens / seconds(functools.partial(together, number), rounds),
                "in turns": tokens / seconds(functools.partial(in_turns, number), rounds),
                "update alone": sizes[0] / seconds(alone, rounds),
                "same bits": same_bits(service, lora, names, tiles, number),
            }
        )
    return rows


def plain_update(
    forward: Callable[..., Any], base: Any, lora: LoraConfig, tiles: Sequence[Tile]
) -> Callable[[], Any]:
    """Return the gradient of the same rows for one model whose adapters are nobody else's."""
    adapters = jax.tree.map(jnp.asarray, init_params(lora, 0))

    @jax.jit
    def gradient(adapters: Any, base: Any, tile: Tile) -> Any:
        def loss(adapters: Any) -> Any:
            wanted = (tile.segment_ids > 0).at[:, -1].set(False)
            given = tile.tokens, tile.positions, tile.segment_ids, tile.targets, wanted
            found = forward(attach(lora, base, adapters), ModelRows(*given), with_entropy=False)[0]
            return -(jnp.roll(found, -1, axis=1) * tile.inputs["weights"]).sum()

        return jax.grad(loss)(adapters)

    placed = jax.device_put(list(tiles))
    return lambda: [gradient(adapters, base, tile) for tile in placed]


def same_bits(
    service: Tenants, lora: LoraConfig, names: set[str], tiles: Sequence[Any], number: int
) -> bool:
    """Return whether the first tenant has the same gradient alone as among the others."""

    def gradient(some: Sequence[Any]) -> Any:
        service.put(0, new_tenant(lora, 0, RANK, 32.0, names))
        service.run(some, learns=True)
        return service.take(0).gradients

    alone = gradient(tiles[0])
    longest = max(map(len, tiles[:number]))
    mixed = [some[n] for n in range(longest) for some in tiles[:number] if n < len(some)]
    return jax.tree.all(jax.tree.map(np.array_equal, alone, gradient(mixed)))


def decoding(
    model: TransformerConfig, tenants: Sequence[int], rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """Measure 64 samples of the base in an engine without places, and of adapters in one with."""
    lora = adapters_of(model)
    base, rng = init_params(model, 0), np.random.default_rng(0)
    prompt = tuple(rng.integers(0, model.vocab_size, 32).tolist())
    sampling, drawn = Sampling(max_tokens=tokens), 64 * tokens

    def engine(places: int) -> NativeEngine:
        made = NativeEngine(
            model,
            make_mesh(devices=jax.devices()[:1]),
            max_num_seqs=64,
            max_model_len=128,
            device_memory=2**32,
            shrink=False,
            lora=lora if places else None,
            places=places,
        )
        made.update_weights(base, 0)
        for place in range(1, places):
            made.put_adapter(place, init_params(lora, place), 1.0)
        return made

    def asked(number: int) -> list[Request]:
        share = 64 // max(number, 1)
        return [
            Request(
                prompt,
                tuple((n, i) for i in range(share)),
                sampling,
                adapter=Adapter(f"model {n}", n + 1) if number else None,
            )
            for n in range(max(number, 1))
        ]

    plain, stacked = engine(0), engine(max(tenants) + 1)
    for made in (plain, stacked):
        made.generate(asked(0))  # compiles
    spent = seconds(lambda: plain.generate(asked(0)), rounds)
    found = [{"adapters": 0, "decoding": drawn / spent}]
    for number in tenants:
        requests = asked(number)
        spent = seconds(lambda some=requests: stacked.generate(some), rounds)
        apart = seconds(lambda some=requests: [stacked.generate([one]) for one in some], rounds)
        found.append({"adapters": number, "decoding": drawn / spent, "in turns": drawn / apart})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a tenant has other bits among others than alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shape", choices=SHAPES, default="3m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    # the head is apart from the embeddings, as the service has it, so that it has an adapter
    model = dataclasses.replace(transformer_config(options.shape), tie_embeddings=False)
    trained = training(model, options.tenants, options.rounds)
    for row in trained:
        print({name: round(x) if isinstance(x, float) else x for name, x in row.items()})
    drawn = decoding(model, options.tenants, options.rounds, options.tokens)
    for row in drawn:
        print({name: round(x) if isinstance(x, float) else x for name, x in row.items()})
    if options.json:
        options.json.write_text(json.dumps({"training": trained, "decoding": drawn}, indent=1))
    return 0 if all(row["same bits"] for row in trained) else 1


if __name__ == "__main__":
    sys.exit(main())
