"""Dynamic sampling: batches are drawn until enough prompts have rewards that differ.

Yu et al., 2025 (DAPO), https://arxiv.org/abs/2503.14476 (sec. 3.2). A prompt whose samples all earn
the same has no advantage, so it would only make the batch smaller.

Prompts are judged by what the environment gave, as in DAPO, whose metric is the accuracy: the soft
overlong punishment and the KL in the rewards come later and do not make two right answers differ.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config import DynamicSamplingConfig, TrainConfig
from jaxrl.data.columns import last_steps, take_trajectories
from jaxrl.data.packing import token_level
from jaxrl.data.selection import filter_rows, replace_rows, zero_variance_groups
from jaxrl.rollout.conversations.concat_outputs import concat_outputs
from jaxrl.types import GeneratorOutput

Draw = Callable[
    [int], tuple[GeneratorOutput, list[str]]
]  # attempt 1, 2 ... -> trajectories, their uids


class DynamicSamplingError(ValueError):
    """Signal that the prompts of this run do not give batches that can be trained on."""


def collect(draw: Draw, config: TrainConfig, step: int) -> tuple[GeneratorOutput, list[str]]:
    """Draw the trajectories of a step: one batch, or as many as dynamic sampling needs."""
    trainer, generator = config.trainer, config.generator
    if trainer.algorithm.dynamic_sampling.type is None:
        return draw(1)

    def judged(output: GeneratorOutput) -> GeneratorOutput:
        return token_level(
            output,
            zero_reward_on_non_stop=generator.zero_reward_on_non_stop,
            apply_overlong_filtering=generator.apply_overlong_filtering,
        )

    return dynamic_sampling(
        draw,
        trainer.algorithm.dynamic_sampling,
        prompts=trainer.train_batch_size,
        tol=trainer.algorithm.zero_variance_filter_tol,
        seed=(trainer.seed, step),
        judged=judged,
    )


def dynamic_sampling(
    draw: Draw,
    settings: DynamicSamplingConfig,
    *,
    prompts: int,
    tol: float,
    seed: Sequence[int],
    judged: Callable[[GeneratorOutput], GeneratorOutput] = lambda output: output,
) -> tuple[GeneratorOutput, list[str]]:
    """Draw batches until `prompts` prompts can be trained on; return trajectories and their uids.

    "filter" keeps the prompts whose rewards differ and draws until it has `prompts` of them;
    what the last batch has beyond that is left out. "replace" takes the first batch in which a
    fraction of min_replace_ratio differs, and lets random ones of these stand in for the others.
    A prompt that comes twice is two groups, with a uid of its own.

    Args:
        draw: one batch of trajectories with consecutive samples of each prompt, and the uid of each
            trajectory; rows may be its steps.
        tol: rewards that differ by at most this are the same.
        seed: of the stand-ins.
        judged: rewards and loss masks that prompts are judged by; they alone are looked at.

    Raises:
        DynamicSamplingError: max_sample_batches were not enough.
    """
    rng, parts, uids = np.random.default_rng(seed), [], []
    for attempt in itertools.count(1):
        output, drawn = draw(attempt)
        samples = len(drawn) // len(set(drawn))
        same = _uninformative(judged(last_steps(output)), drawn, samples, tol)
        if settings.type == "filter":
            rows = filter_rows(same, drawn, prompts - len(uids) // samples)
        else:
            replaced = replace_rows(same, drawn, settings.min_replace_ratio, rng)
            rows = np.arange(0) if replaced is None else replaced[0]
        parts.append(take_trajectories(output, rows))
        uids += [drawn[row] for row in rows]
        if len(uids) == prompts * samples:
            return concat_outputs(parts), distinct_uids(uids, samples)
        if attempt == settings.max_sample_batches:
            good = prompts - int(same.sum()) // samples
            raise DynamicSamplingError(
                f"dynamic sampling ({settings.type!r}) drew {attempt} batches of {prompts} prompts "
                f"and has {len(uids) // samples} to train on; in the last one the rewards of "
                f"{good} differed. The prompts are too easy or too hard; or raise "
                "trainer.algorithm.dynamic_sampling.max_sample_batches (-1 = never give up)"
            )
    raise AssertionError("unreachable")


def _uninformative(
    output: GeneratorOutput, uids: Sequence[str], samples: int, tol: float
) -> np.ndarray:
    """Mark the rows [B] bool of prompts without two learnable trajectories whose rewards differ.

    A prompt with a single sample has no group to differ from and is kept, as in SkyRL.
    """
    same = zero_variance_groups(output["rewards"], uids, output["loss_masks"], tol=tol)
    learnable = Counter(
        uid for uid, mask in zip(uids, output["loss_masks"], strict=True) if any(mask)
    )
    return same | np.array([learnable[uid] < min(samples, 2) for uid in uids])


def distinct_uids(uids: Sequence[str], samples: int) -> list[str]:
    """Make uids of groups of `samples` consecutive rows distinct: the second "a" becomes "a#2"."""
    seen: Counter[str] = Counter()
    distinct = []
    for uid in uids[::samples]:
        seen[uid] += 1
        distinct += [uid if seen[uid] == 1 else f"{uid}#{seen[uid]}"] * samples
    return distinct
