"""Seconds that the data card of a run takes.

    python -m benchmarks.data_card --prompts 100000

Claim: the card of 100,000 prompts of 60 words takes a few seconds at the start of a run.
"""

import argparse
import random
import string
import time

from jaxrl.data.card import data_card
from jaxrl.types import Prompt


def random_prompts(count: int, rng: random.Random) -> list[Prompt]:
    """Prompts of 60 random words."""
    words = ["".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9))) for _ in range(5000)]
    truth = {"reward_spec": {"ground_truth": "4"}}
    texts = (" ".join(rng.choices(words, k=60)) + "?" for _ in range(count))
    return [
        Prompt(f"0:{i}", [{"role": "user", "content": text}], (1,) * 100, "gsm8k", truth)
        for i, text in enumerate(texts)
    ]


def main() -> None:
    """Print the seconds, and the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100_000)
    rng = random.Random(0)
    train = random_prompts(parser.parse_args().prompts, rng)
    evaluation = random_prompts(1319, rng)
    started = time.perf_counter()
    card = data_card(train, evaluation, sources=["train"], eval_sources=["evaluation"])
    print(f"{len(train)} prompts: {time.perf_counter() - started:.2f} s\n{card}")


if __name__ == "__main__":
    main()
