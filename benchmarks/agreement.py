"""Sampler against trainer: the log-prob of every token of a long mixed rollout.

    python -m benchmarks.agreement [--model=models/smollm2-135m-instruct] [--tokens=50000]

Claim: over 50,000 tokens (3M shape) of conversations of three turns (prompts of 16-600 tokens, some
in chunks; prefixes found in the cache; new weights while samples are in flight, their cache
computed anew) the log-prob that came with each token differs in float32 from that of the trainer's
forward, under the version that drew it, by at most 1e-4, and with one matrix of the engine left as
it was by more than that. bfloat16 and a cache of the old weights are run beside them.

The new weights are the old ones with noise of 2 % of the size of each matrix. Products of
float32 are of the highest precision that the platform has.
"""

import argparse
import functools
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.data.packing import length_bucket, one_per_row
from jaxrl.forward import log_probs_and_entropy
from jaxrl.models import hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling

TURNS, ROWS = 3, 8  # of a conversation; of a scoring pass
LIMIT = 1e-4  # of the first variant
VARIANTS = {  # engine dtype, recompute_kv_on_update, planted
    "float32": (jnp.float32, True, False),
    "old keys and values": (jnp.float32, False, False),
    "bfloat16": (jnp.bfloat16, True, False),
    "one stale matrix": (jnp.float32, True, True),
}


@dataclass(eq=False)
class Talk:
    """A conversation: its tokens, and of the sampled ones place, log-prob and version."""

    tokens: list[int]
    said: list[list[int]]  # by the user, between the turns
    turns: int = 0
    sampled: list[tuple[int, float, int]] = field(default_factory=list)

    def take(self, completion: Completion) -> None:
        """Append a turn, and what the user says to it."""
        places = range(len(self.tokens), len(self.tokens) + len(completion.tokens))
        columns = places, completion.log_probs, completion.versions
        self.sampled += zip(*columns, strict=True)
        self.tokens += completion.tokens
        if self.turns < TURNS - 1:
            self.tokens += self.said[self.turns]
        self.turns += 1


def conversations(vocab: int, tokens: int, *, smoke: bool) -> list[Talk]:
    """Enough of them for so many sampled tokens; a third share the beginning of their prompt."""
    rng = np.random.default_rng(0)
    longest, turn = (40, 8) if smoke else (600, 200)
    common = rng.integers(3, vocab, longest // 2).tolist()
    talks = []
    for number in range(-(-tokens // (TURNS * turn))):
        prompt = rng.integers(3, vocab, rng.integers(16, longest + 1)).tolist()
        if number % 3 == 0:
            prompt[: len(common)] = common[: len(prompt) - 1]
        said = [rng.integers(3, vocab, rng.integers(2, 30)).tolist() for _ in range(TURNS - 1)]
        talks.append(Talk(prompt, said))
    return talks


def hold(engine: NativeEngine, talks: Sequence[Talk], limit: int, update: Any) -> int:
    """All conversations to their ends; `update` is called halfway. Prompt tokens of all turns."""
    open_turns: dict[Future[Completion], Talk] = {}
    asked = 0

    def submit(some: Sequence[Talk]) -> None:
        nonlocal asked
        numbers = [talks.index(talk) for talk in some]
        requests = [
            Request(tuple(talk.tokens), ((number, talk.turns),), Sampling(max_tokens=limit))
            for number, talk in zip(numbers, some, strict=True)
        ]
        asked += sum(len(talk.tokens) for talk in some)
        for (future,), talk in zip(engine.submit(requests), some, strict=True):
            open_turns[future] = talk

    total = len(talks) * TURNS * limit
    updating = threading.Thread(target=_halfway, args=(engine, total // 2, update))
    updating.start()
    submit(talks)
    while open_turns:
        done = list(wait(open_turns, return_when=FIRST_COMPLETED).done)
        finished = [open_turns.pop(future) for future in done]
        for future, talk in zip(done, finished, strict=True):
            talk.take(future.result())
        submit([talk for talk in finished if talk.turns < TURNS])
    updating.join()
    return asked


def _halfway(engine: NativeEngine, tokens: int, update: Any) -> None:
    while engine.decoded_tokens < tokens:
        time.sleep(0.005)
    update()


def score(
    model: TransformerConfig, versions: Sequence[Params], talks: Sequence[Talk], dtype: Any
) -> np.ndarray:
    """|sampler - trainer| of every sampled token, under the version that drew it."""
    forward = jax.jit(
        functools.partial(log_probs_and_entropy, model, temperature=1.0, dtype=dtype),
        static_argnames="with_entropy",
    )
    differences = []
    by_length = sorted(talks, key=lambda talk: len(talk.tokens))
    for first in range(0, len(by_length), ROWS):
        part = by_length[first : first + ROWS]
        lengths = np.zeros(ROWS, np.int32)
        lengths[: len(part)] = [len(talk.tokens) for talk in part]
        tokens = np.zeros((ROWS, length_bucket(int(lengths.max()))), np.int32)
        for row, talk in enumerate(part):
            tokens[row, : len(talk.tokens)] = talk.tokens
        rows = one_per_row(tokens, lengths, np.ones_like(tokens))
        found = [np.asarray(forward(p, rows, with_entropy=False)[0]) for p in versions]
        differences += [
            abs(log_prob - found[version][row, place])
            for row, talk in enumerate(part)
            for place, log_prob, version in talk.sampled
        ]
    return np.array(differences)


def noisy(params: Params, seed: int) -> Params:
    """Each array with noise of 2 % of its size."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            x + 0.02 * x.std() * jax.random.normal(key, x.shape, x.dtype)
            for x, key in zip(leaves, keys, strict=True)
        ],
    )


def run_variant(
    name: str, model: TransformerConfig, old: Params, new: Params, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One rollout and its differences."""
    dtype, recompute, planted = VARIANTS[name]
    precision = (
        "highest" if dtype == jnp.float32 else "default"
    )  # XLA's CPU has no other of bfloat16
    jax.config.update("jax_default_matmul_precision", precision)  # of all threads
    given = new
    if planted:  # the first layer's output projection was forgotten
        stale = new["layers"]["wo"].at[0].set(old["layers"]["wo"][0])
        given = new | {"layers": new["layers"] | {"wo": stale}}
    engine = NativeEngine(
        model,
        make_mesh(devices=jax.devices()[:1]),
        dtype=dtype,
        max_num_seqs=arguments.slots,
        steps_per_dispatch=16,
        enable_prefix_caching=True,
        recompute_kv_on_update=recompute,
    )
    engine.update_weights(old, 0)
    talks = conversations(model.vocab_size, arguments.tokens, smoke=arguments.smoke)
    started = time.perf_counter()
    limit = 8 if arguments.smoke else 200
    asked = hold(engine, talks, limit, lambda: engine.update_weights(given, 1))
    seconds = time.perf_counter() - started
    differences = score(model, (old, new), talks, dtype)
    versions = [version for talk in talks for *_, version in talk.sampled]
    return {
        "variant": name,
        "tokens": len(differences),
        "of_new_version": int(np.sum(versions)),
        "prompt_tokens": asked,
        "prefilled": engine.prefilled_tokens,
        "max": float(differences.max()),
        "p99": float(np.quantile(differences, 0.99)),
        "mean": float(differences.mean()),
        "seconds": seconds,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants, printed as they come."""
    folder = arguments.model
    model = hf.load_config(folder) if folder else transformer_config(arguments.shape)
    old = hf.load_params(folder, model) if folder else init_params(model, 0)
    new = noisy(old, 1)
    print(
        f"{'':<22}{'tokens':>8}{'new':>8}{'prompts':>9}{'prefilled':>11}{'max':>11}{'p99':>11}"
        f"{'mean':>11}{'s':>7}"
    )
    rows = []
    for name in arguments.variants or VARIANTS:
        row = run_variant(name, model, old, new, arguments)
        rows.append(row)
        print(
            f"{name:<22}{row['tokens']:>8}{row['of_new_version']:>8}{row['prompt_tokens']:>9}"
            f"{row['prefilled']:>11}{row['max']:>11.1e}{row['p99']:>11.1e}{row['mean']:>11.1e}"
            f"{row['seconds']:>7.0f}",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--shape", default="3m", choices=list(SHAPES), help="without --model")
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled, of each variant")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, few tokens")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.shape, arguments.tokens, arguments.model, arguments.slots = "smoke", 240, None, 4
    rows = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    kept = all(row["max"] <= LIMIT for row in rows if row["variant"] == "float32")
    caught = all(row["max"] > LIMIT for row in rows if row["variant"] == "one stale matrix")
    return 0 if kept and caught else 1


if __name__ == "__main__":
    raise SystemExit(main())
