"""Sampler against trainer: the log-prob of every token of a long mixed rollout.

    python -m benchmarks.agreement [--model=models/smollm2-135m-instruct] [--tokens=50000]

Rollouts of 50,000 tokens (3M shape), in each of which weights change while samples are in flight:

    conversations  of three turns, prompts of 16-600 tokens, some in chunks, one update
    kept pages     the same, each of which keeps its pages until it is over
    waiting group  three times as many samples of a prompt as there are slots, one update
    shared prompt  requests of one sample that begin alike, of different lengths, six updates

The cache gives what was decoded to any request, but in the second and third, where it gives what
was prefilled alone. Claim: the log-prob of each token whose two versions agree (the one that drew
it, and the oldest in its context) differs in float32 from that of the trainer's forward under this
version by at most 1e-4. With `recompute_kv_on_update` these are all tokens. Without it the share of
the others is printed, and none of them is of a sample that drew its first token after the update,
but of one that goes on with its conversation's pages. With one matrix of the engine left as it was
the difference is larger; bfloat16 is run beside it.

New weights are the first ones with noise of 2 % of the size of each matrix. Products of float32 are
of the highest precision that the platform has.
"""

import argparse
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.data.packing import length_bucket, one_per_row
from jaxrl.models import hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy

TURNS, ROWS = 3, 8  # of a conversation; of a scoring pass
LIMIT = 1e-4  # of float32


@dataclass(eq=False)
class Talk:
    """A conversation: its tokens, and of the sampled ones what is known of each.

    Attributes:
        said: by the user, between the turns.
        limit: tokens of a turn.
        sampled: place, log-prob, version, oldest version in its context, version of the first token
            of its turn.
    """

    tokens: list[int]
    said: list[list[int]]
    limit: int
    turns: int = 0
    over: Future[None] = field(default_factory=Future)
    sampled: list[tuple[int, float, int, int, int]] = field(default_factory=list)

    def take(self, completion: Completion) -> None:
        """Append a turn, and what the user says to it."""
        places = range(len(self.tokens), len(self.tokens) + len(completion.tokens))
        versions = completion.versions, completion.context_versions
        began = [completion.versions[0]] * len(completion.tokens)
        self.sampled += zip(places, completion.log_probs, *versions, began, strict=True)
        self.tokens += completion.tokens
        if self.turns < len(self.said):
            self.tokens += self.said[self.turns]
        else:
            self.over.cancel()
        self.turns += 1


def conversations(vocab: int, tokens: int, slots: int, longest: int, turn: int) -> list[Talk]:
    """Enough of them for so many sampled tokens; a third share the beginning of their prompt."""
    del slots
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocab, longest // 2).tolist()
    talks = []
    for number in range(-(-tokens // (TURNS * turn))):
        prompt = rng.integers(3, vocab, rng.integers(16, longest + 1)).tolist()
        if number % 3 == 0:
            prompt[: len(common)] = common[: len(prompt) - 1]
        said = [rng.integers(3, vocab, rng.integers(2, 30)).tolist() for _ in range(TURNS - 1)]
        talks.append(Talk(prompt, said, turn))
    return talks


def waiting_group(vocab: int, tokens: int, slots: int, longest: int, turn: int) -> list[Talk]:
    """One prompt, and three times as many samples of it as there are slots."""
    turn = max(min(turn, tokens // (3 * slots)), 1)
    prompt = np.random.default_rng(0).integers(3, vocab, longest).tolist()
    return [Talk(list(prompt), [], turn) for _ in range(3 * slots)]


def shared_prompt(vocab: int, tokens: int, slots: int, longest: int, turn: int) -> list[Talk]:
    """Answers of half to all of `turn` tokens; half of every prompt is the same."""
    del slots
    rng = np.random.default_rng(0)
    common, talks = rng.integers(3, vocab, longest // 2).tolist(), []
    while sum(talk.limit for talk in talks) < tokens:
        own = rng.integers(3, vocab, rng.integers(1, longest // 2)).tolist()
        talks.append(Talk([*common, *own], [], int(rng.integers(turn // 2, turn + 1))))
    return talks


@dataclass(frozen=True)
class Variant:
    """A rollout, and the engine's settings.

    Attributes:
        talks: (vocabulary, sampled tokens, slots, longest prompt, tokens of a turn) -> rollout.
        prefixes: what was decoded is found by any request.
        keeps: conversations keep their pages.
        planted: the first layer's output projection was forgotten in every update.
    """

    talks: Callable[[int, int, int, int, int], list[Talk]]
    recompute: bool
    updates: int = 1
    prefixes: bool = True
    keeps: bool = False
    dtype: Any = jnp.float32
    planted: bool = False


VARIANTS = {
    "conversations": Variant(conversations, False),
    "conversations, recomputed": Variant(conversations, True),
    "kept pages": Variant(conversations, False, prefixes=False, keeps=True),
    "kept pages, recomputed": Variant(conversations, True, prefixes=False, keeps=True),
    "waiting group": Variant(waiting_group, False, prefixes=False),
    "waiting group, recomputed": Variant(waiting_group, True, prefixes=False),
    "shared prompt": Variant(shared_prompt, False, 6),
    "shared prompt, recomputed": Variant(shared_prompt, True, 6),
    "bfloat16": Variant(conversations, True, dtype=jnp.bfloat16),
    "one stale matrix": Variant(conversations, True, planted=True),
}


def hold(
    engine: NativeEngine,
    talks: Sequence[Talk],
    updates: Sequence[Callable[[], None]],
    *,
    keeps: bool,
) -> int:
    """All conversations to their ends, and the updates at equal distances. Tokens of all prompts.

    Neighbours with the same tokens are samples of one request.
    """
    open_turns: dict[Future[Completion], Talk] = {}
    asked = 0

    def submit(some: Sequence[Talk]) -> None:
        nonlocal asked
        requests = []
        for tokens, alike in itertools.groupby(some, lambda talk: tuple(talk.tokens)):
            group = list(alike)
            keys = tuple((talks.index(talk), talk.turns) for talk in group)
            kept = tuple(talk.over for talk in group) if keeps else ()
            sampling = Sampling(max_tokens=group[0].limit)
            requests.append(Request(tokens, keys, sampling, conversations=kept))
        asked += sum(len(talk.tokens) for talk in some)
        futures = itertools.chain.from_iterable(engine.submit(requests))
        open_turns.update(zip(futures, some, strict=True))

    total = sum(talk.limit * (len(talk.said) + 1) for talk in talks)
    updating = threading.Thread(target=_spread, args=(engine, total, updates))
    updating.start()
    submit(talks)
    while open_turns:
        done = list(wait(open_turns, return_when=FIRST_COMPLETED).done)
        finished = [open_turns.pop(future) for future in done]
        for future, talk in zip(done, finished, strict=True):
            talk.take(future.result())
        submit([talk for talk in finished if talk.turns <= len(talk.said)])
    updating.join()
    return asked


def _spread(engine: NativeEngine, tokens: int, updates: Sequence[Callable[[], None]]) -> None:
    for number, update in enumerate(updates, 1):
        while engine.decoded_tokens < tokens * number // (len(updates) + 1):
            time.sleep(0.005)
        update()


@functools.cache  # compiled once for all variants
def trainers_forward(model: TransformerConfig, dtype: Any) -> Any:
    """Log-probs of rows by the function that the trainer scores with."""
    return jax.jit(
        functools.partial(log_probs_and_entropy, model, temperature=1.0, dtype=dtype),
        static_argnames="with_entropy",
    )


def score(
    model: TransformerConfig, versions: Sequence[Params], talks: Sequence[Talk], dtype: Any
) -> np.ndarray:
    """|sampler - trainer| of every sampled token, under the version that drew it.

    Columns: the difference, and the three versions of `Talk.sampled`.
    """
    forward = trainers_forward(model, dtype)
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
            (abs(log_prob - found[version][row, place]), version, context, began)
            for row, talk in enumerate(part)
            for place, log_prob, version, context, began in talk.sampled
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
    name: str, model: TransformerConfig, old: Params, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One rollout and its differences."""
    variant = VARIANTS[name]
    precision = (
        "highest" if variant.dtype == jnp.float32 else "default"
    )  # XLA's CPU has no other of bfloat16
    jax.config.update("jax_default_matmul_precision", precision)  # of all threads
    weights = [old, *(noisy(old, version) for version in range(1, variant.updates + 1))]
    given = list(weights)
    if variant.planted:
        stale = weights[1]["layers"]["wo"].at[0].set(old["layers"]["wo"][0])
        given[1] = weights[1] | {"layers": weights[1]["layers"] | {"wo": stale}}
    engine = NativeEngine(
        model,
        make_mesh(devices=jax.devices()[:1]),
        dtype=variant.dtype,
        max_num_seqs=arguments.slots,
        steps_per_dispatch=4 if arguments.smoke else 16,
        enable_prefix_caching=variant.prefixes,
        recompute_kv_on_update=variant.recompute,
    )
    engine.update_weights(old, 0)
    sizes = (160, 8) if arguments.smoke else (600, 200)  # half of the first fills a page
    talks = variant.talks(model.vocab_size, arguments.tokens, arguments.slots, *sizes)
    started = time.perf_counter()
    asked = hold(
        engine,
        talks,
        [functools.partial(engine.update_weights, given[v], v) for v in range(1, len(given))],
        keeps=variant.keeps,
    )
    seconds = time.perf_counter() - started
    difference, version, context, began = score(model, weights, talks, variant.dtype).T
    agree = context == version
    return {
        "variant": name,
        "tokens": len(difference),
        "of_new_version": int((version > 0).sum()),
        "prompt_tokens": asked,
        "prefilled": engine.prefilled_tokens,
        "older_context": int((~agree).sum()),
        "older_than_sample": int((context < began).sum()),
        "max_of_older": float(difference[~agree].max(initial=0)),
        "max": float(difference[agree].max()),
        "p99": float(np.quantile(difference[agree], 0.99)),
        "mean": float(difference[agree].mean()),
        "seconds": seconds,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants, printed as they come."""
    folder = arguments.model
    model = hf.load_config(folder) if folder else transformer_config(arguments.shape)
    old = hf.load_params(folder, model) if folder else init_params(model, 0)
    print(
        f"{'':<26}{'tokens':>8}{'new':>8}{'prompts':>9}{'prefilled':>11}{'older context':>15}"
        f"{'their max':>11}{'max':>9}{'p99':>9}{'mean':>9}{'s':>6}"
    )
    rows = []
    for name in arguments.variants or VARIANTS:
        row = run_variant(name, model, old, arguments)
        rows.append(row)
        print(
            f"{name:<26}{row['tokens']:>8}{row['of_new_version']:>8}{row['prompt_tokens']:>9}"
            f"{row['prefilled']:>11}{row['older_context'] / row['tokens']:>15.1%}"
            f"{row['max_of_older']:>11.1e}{row['max']:>9.1e}{row['p99']:>9.1e}{row['mean']:>9.1e}"
            f"{row['seconds']:>6.0f}",
            flush=True,
        )
    return rows


def holds(row: dict[str, Any]) -> bool:
    """Whether the claim is true of a variant."""
    variant = VARIANTS[row["variant"]]
    if variant.planted:
        return row["max"] > LIMIT
    within = row["max"] <= LIMIT or variant.dtype != jnp.float32
    if variant.recompute:
        return within and not row["older_context"]
    return within and (variant.keeps or not row["older_than_sample"])


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
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
