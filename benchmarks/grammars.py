"""Answers that a grammar is followed for: tokens per second beside those of free answers.

    JAX_PLATFORMS=cpu python -m benchmarks.grammars [--shape=3m] [--rows 1 8] [--steps=8]

Weights are random; the tokenizer is trained on Python's own library, with the vocabulary of the
shape. All rows draw as many tokens: free ones, those of a schema that does not end before, or one
row of a schema beside others that are free. They go by turns; of three rounds the fastest counts.

Claim: a block of one step is what it costs; the masks themselves are a small part.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Constraint, Request, Sampling
from jaxrl.rollout.server.grammars import Grammars
from jaxrl.rollout.server.served_model import ServedModel

PROMPT, DRAWN, ROUNDS = 32, 128, 3
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["name", "x", "y"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PLACE, "minItems": 1000}


def tokenizer_of(vocab: int, files: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with so many tokens at most."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    known = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in known)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def constrain_of(model: TransformerConfig, files: int = 1000) -> Callable[[], Constraint]:
    """Return what makes constraints of the schema."""
    tokenizer = tokenizer_of(model.vocab_size, files)
    served = ServedModel("", tokenizer, model.vocab_size, PROMPT + DRAWN, (0,))
    return Grammars(served).constrain("schema", SCHEMA, SCHEMA)


def measure(
    engine: NativeEngine, rows: int, constrain: Callable[[], Constraint]
) -> dict[str, float]:
    """Return tokens per second of all rows, by which of them have a grammar."""
    vocab = engine.programs.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab, (rows, PROMPT)).tolist()
    free, bound = Sampling(DRAWN), Sampling(DRAWN, stop_token_ids=(0,))
    kinds = {"free": 0, "one of a schema": 1, "all of a schema": rows}
    best = dict.fromkeys(kinds, float("inf"))
    for number in range(1 + ROUNDS):
        for kind, some in kinds.items():
            asks = [
                Request(tuple(p), ((1, i),), bound, constrain=constrain)
                if i < some
                else Request(tuple(p), ((1, i),), free)
                for i, p in enumerate(prompts)
            ]
            start = time.perf_counter()
            found = [of_request[0] for of_request in engine.generate(asks)]
            assert all(len(completion.tokens) == DRAWN for completion in found)
            if number:  # the first one compiles
                best[kind] = min(best[kind], time.perf_counter() - start)
    return {kind: rows * DRAWN / seconds for kind, seconds in best.items()}


def mask_seconds(constrain: Callable[[], Constraint], number: int = 200) -> float:
    """Return the seconds of a mask, on average over an answer of random tokens."""
    constraint, draw, seconds = constrain(), np.random.default_rng(0), 0.0
    for _ in range(number):
        start = time.perf_counter()
        bits = constraint.allowed()
        seconds += time.perf_counter() - start
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        constraint.take([int(draw.choice(ids))])
    return seconds / number


def main() -> None:
    """Print tokens per second by rows, and the time of a mask."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="3m", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--steps", type=int, default=8, help="of a block; serve's default is 8")
    options = parser.parse_args()
    model = config_from_hf(SHAPES[options.shape])
    params, constrain = init_params(model, 0), constrain_of(model)
    print(
        f"{options.shape}, {jax.devices()[0].device_kind}: "
        f"a mask takes {mask_seconds(constrain) * 1e6:.0f} us; tokens per second"
    )
    for rows in options.rows:
        mesh = make_mesh(devices=jax.devices()[:1])
        engine = NativeEngine(
            model, mesh, max_num_seqs=rows, shrink=False, steps_per_dispatch=options.steps
        )
        engine.update_weights(params, 0)
        found = measure(engine, rows, constrain)
        print(f"rows {rows}: {', '.join(f'{k} {v:.0f}' for k, v in found.items())}", flush=True)


if __name__ == "__main__":
    main()
