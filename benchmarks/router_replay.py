"""Replay of routers: sampler against trainer in bfloat16, with the sampler's experts and without.

    python -m benchmarks.router_replay [--tokens=20000]

Four layers with 32 experts of which a token has four, random weights, and a dense model of the same
width with as many active parameters. The engine samples in bfloat16; the trainer's forward scores
each token in bfloat16 too, but in whole rows. Printed: the share of the sampler's choices that the
trainer does not make, and |sampler - trainer| of the tokens' log-probs.

Claims: without replay at least 1 % of the choices differ (else the model is too easy); with it the
mean difference is at most 1.5 times that of the dense model; an engine whose first router is stale
(noise of 5 %) shows in the share that differs at least twice as large, replayed or not.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data.packing import length_bucket, one_per_row
from jaxrl.models.architecture import Experts, TransformerConfig, by_kind, joined
from jaxrl.models.transformer import Params, init_params, routed_forward
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy

WIDTH, PROMPT, RESPONSE, ROWS = 128, 24, 200, 8
LIMIT, LEAST, STALE = 1.5, 0.01, 2.0
MIXTURE = TransformerConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=4 * WIDTH,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    qk_norm=True,
    initializer_range=0.06,
    experts=Experts(count=32, per_token=4, width=WIDTH, normalise=True),
)
DENSE = dataclasses.replace(MIXTURE, experts=None)


def samples(model: TransformerConfig, params: Params, tokens: int) -> list[tuple[int, ...]]:
    """Sample in bfloat16; return pairs of a prompt and its completion."""
    rng, keep = np.random.default_rng(0), model.experts is not None
    requests = [
        Request(
            tuple(rng.integers(3, model.vocab_size, rng.integers(8, PROMPT + 1)).tolist()),
            tuple((number, sample) for sample in range(4)),
            Sampling(RESPONSE),
        )
        for number in range(-(-tokens // (4 * RESPONSE)))
    ]
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = NativeEngine(model, mesh, dtype=jnp.bfloat16, max_num_seqs=32, keep_routes=keep)
    engine.update_weights(params, 0)
    groups = engine.generate(requests)
    return [(r.prompt_tokens, c) for r, g in zip(requests, groups, strict=True) for c in g]


def scored(
    model: TransformerConfig,
    params: Params,
    pairs: Sequence[tuple[tuple[int, ...], Completion]],
    *,
    replay: bool,
) -> dict[str, float]:
    """Compare what was sampled with the trainer's forward."""
    width = length_bucket(PROMPT + RESPONSE)

    @jax.jit
    def score(rows: Any) -> Any:
        kind = {"routers": ("differs",)} if rows.routes is not None else {}
        settings: dict[str, Any] = {"temperature": 1.0, "dtype": jnp.bfloat16, **kind}
        return log_probs_and_entropy(model, params, rows, with_entropy=False, **settings)

    @jax.jit
    def chosen(rows: Any) -> Any:
        names = ("kernel", "experts_kernel")
        settings: dict[str, Any] = {"remat": "none", "dtype": jnp.bfloat16, "placement": None}
        given = params, rows.tokens, rows.positions, rows.segment_ids
        settings |= dict.fromkeys(names, "xla") | {
            "context": "gather",
            "observe": lambda routing: routing.ids,
        }
        return jnp.moveaxis(routed_forward(model, *given, **settings)[1], 0, 2)

    differences: list[np.ndarray] = []
    differs: list[np.ndarray] = []
    for first in range(0, len(pairs), ROWS):
        part = pairs[first : first + ROWS]
        tokens, lengths = np.zeros((ROWS, width), np.int32), np.zeros(ROWS, np.int32)
        sampled, drawn = np.zeros((ROWS, width), bool), np.zeros((ROWS, width), np.float32)
        routes = None
        if model.experts is not None:
            shape = ROWS, width, model.num_layers, model.experts.per_token
            routes = np.full(shape, 255, np.uint8)
        for row, (prompt, completion) in enumerate(part):
            whole = [*prompt, *completion.tokens]
            tokens[row, : len(whole)], lengths[row] = whole, len(whole)
            sampled[row, len(prompt) : len(whole)] = True
            drawn[row, len(prompt) : len(whole)] = completion.log_probs
            if routes is not None:
                assert completion.routes is not None
                routes[row, : len(completion.routes)] = completion.routes
        rows = one_per_row(tokens, lengths, sampled, {"routes": routes if replay else None})
        found = jax.device_get(score(rows))
        differences.append(np.abs(found[0] - drawn)[sampled])
        if routes is None:
            continue
        known = routes[:, :, 0, 0] < 255
        if replay:
            differs.append(found[2][known])
        else:
            own = np.asarray(chosen(rows))
            agrees = (routes[..., None] == own[..., None, :]).any(-1).mean(axis=(2, 3))
            differs.append(1 - agrees[known])
    difference = np.concatenate(differences)
    return {
        "tokens": len(difference),
        "differs": float(np.mean(np.concatenate(differs))) if differs else 0.0,
        "mean": float(difference.mean()),
        "p99": float(np.quantile(difference, 0.99)),
        "max": float(difference.max()),
    }


def stale_router(params: Params) -> Params:
    """Return the parameters with noise of 5 % of its size on the first layer's router."""
    layers = dict(by_kind(MIXTURE, params["layers"])["experts"])
    router = layers["router"]
    noise = jax.random.normal(jax.random.key(5), router.shape[1:]) * router[0].std() * 0.05
    layers["router"] = router.at[0].add(noise)
    return {**params, "layers": joined({"experts": layers})}


def run(tokens: int) -> dict[str, dict[str, float]]:
    """Return the figures of all variants, printed as they come."""
    print(f"{'':<28}{'tokens':>8}{'differs':>10}{'mean':>10}{'p99':>10}{'max':>10}")
    found = {}
    params = init_params(MIXTURE, 0)
    dense = init_params(DENSE, 0)
    for name, model, weights, given in (
        ("dense", DENSE, dense, dense),
        ("experts", MIXTURE, params, params),
        ("experts, stale router", MIXTURE, params, stale_router(params)),
    ):
        pairs = samples(model, given, tokens)
        for replay in (False, True)[: 1 + (model.experts is not None)]:
            label = name + ", replayed" * replay
            row = found[label] = scored(model, weights, pairs, replay=replay)
            print(
                f"{label:<28}{row['tokens']:>8}{row['differs']:>10.2%}"
                f"{row['mean']:>10.1e}{row['p99']:>10.1e}{row['max']:>10.1e}",
                flush=True,
            )
    return found


def holds(found: dict[str, dict[str, float]]) -> bool:
    """Return whether the claims are true."""
    free, replayed = found["experts"], found["experts, replayed"]
    stale = [found[f"experts, stale router{x}"]["differs"] for x in ("", ", replayed")]
    return (
        free["differs"] >= LEAST
        and replayed["mean"] <= LIMIT * found["dense"]["mean"]
        and stale[0] >= STALE * free["differs"]
        and stale[1] >= STALE * replayed["differs"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="sampled, of each variant")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="few tokens")
    arguments = parser.parse_args(argv)
    found = run(800 if arguments.smoke else arguments.tokens)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0 if arguments.smoke or holds(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
