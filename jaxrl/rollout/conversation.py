"""Conversations between engine and environments: token ids in, token ids out.

The engine's tokens and log-probs go into the trajectory as they are; text exists only for the
environment.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np

from jaxrl import envs
from jaxrl.config import SamplingParams
from jaxrl.registry import accepted_keywords
from jaxrl.rollout.protocol import Completion, Engine, Request, Sampling
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt, Trajectory


def sample_key(*names: object) -> tuple[int, int]:
    """PRNG key data from whatever names a sample: seed, phase, step, prompt, number.

    A sample's tokens then depend on its name and the weights, not on what ran beside or before it,
    which is what makes a resumed run equal to an uninterrupted one.
    """
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def generator_input(
    prompts: Sequence[Prompt], samples: int, names: Sequence[object], sampling: Sampling
) -> GeneratorInput:
    """`samples` trajectories of every prompt, each with a key named by `names`, prompt and number.

    Args:
        names: seed, phase and step.
    """
    return GeneratorInput(
        prompts=[p for p in prompts for _ in range(samples)],
        keys=[sample_key(*names, p.uid, i) for p in prompts for i in range(samples)],
        sampling=sampling,
    )


def sampling_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> Sampling:
    """Sampling parameters as the engine takes them, with the model's end-of-sequence ids."""
    return Sampling(
        max_tokens=params.max_generate_length,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        stop_token_ids=(*eos_token_ids, *(params.stop_token_ids or ())),
    )


class ConversationGenerator:
    """Holds single-turn conversations: the engine speaks, the environment judges.

    Args:
        engine: samples token ids.
        tokenizer: turns them into the text that environments read.
        env_config: handed to every environment.
        max_env_workers: threads for `env.step`; 0 = inline.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        env_config: Mapping[str, Any] | None = None,
        max_env_workers: int = 32,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.env_config = env_config
        # kept from batch to batch: starting threads took longer than judging 512 short answers
        self._pool = ThreadPoolExecutor(max_env_workers) if max_env_workers else None

    def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """One trajectory per entry of the batch, in order; equal neighbours share a prefill.

        Raises:
            RuntimeError: an environment raised; names the environment and the prompt.
            ValueError: a reward that is not finite, or not one number per token.
        """
        prompts = batch["prompts"]
        groups = [list(g) for _, g in groupby(range(len(prompts)), key=lambda i: prompts[i].uid)]
        requests = [
            Request(
                prompt_tokens=prompts[rows[0]].tokens,
                keys=tuple(batch["keys"][i] for i in rows),
                sampling=batch["sampling"],
            )
            for rows in groups
        ]
        completions = [c for samples in self.engine.generate(requests) for c in samples]

        def judge(pair: tuple[Prompt, Completion]) -> Trajectory:
            return score(*pair, tokenizer=self.tokenizer, env_config=self.env_config)

        pairs = list(zip(prompts, completions, strict=True))
        run = self._pool.map if self._pool else map
        return to_columns(list(run(judge, pairs)))


def score(
    prompt: Prompt,
    completion: Completion,
    *,
    tokenizer: Any,
    env_config: Mapping[str, Any] | None,
) -> Trajectory:
    """Let the prompt's environment judge a completion."""
    ended = completion.stop_reason == "stop"
    spoken = completion.tokens[:-1] if ended else completion.tokens
    text = tokenizer.decode(spoken, skip_special_tokens=True)
    try:
        env = envs.make(prompt.env_class, prompt.extras, env_config)
        env.init(prompt.messages)
        asked = _step_keywords(type(env))
        details: dict[str, Any] = {"stopped": ended} if "stopped" in asked else {}
        if "tokens" in asked:
            details["tokens"] = [tokenizer.decode([t]) for t in completion.tokens]
        step = env.step(text, **details)
        rewards = np.asarray(step["reward"], np.float64).tolist()  # an env may use numpy's numbers
        metrics = env.get_metrics()
        env.close()
    except Exception as error:
        raise RuntimeError(
            f"environment '{prompt.env_class}' failed on prompt {prompt.uid} with the answer "
            f"{text!r}: {error!r}"
        ) from error
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"environment '{prompt.env_class}' gave the reward {rewards!r} for prompt {prompt.uid} "
            f"and the answer {text!r}; rewards must be finite"
        )
    if isinstance(rewards, list) and len(rewards) != len(completion.tokens):
        raise ValueError(
            f"environment '{prompt.env_class}' gave {len(rewards)} rewards for the "
            f"{len(completion.tokens)} tokens of prompt {prompt.uid}; give one per "
            "token, or a number"
        )
    return Trajectory(
        uid=prompt.uid,
        prompt_tokens=list(prompt.tokens),
        response_tokens=completion.tokens,
        loss_mask=[1] * len(completion.tokens),
        rollout_log_probs=completion.log_probs,
        rewards=rewards,
        stop_reason=completion.stop_reason,
        policy_version=completion.versions[0],
        env_class=prompt.env_class,
        env_metrics=metrics,
    )


@functools.cache
def _step_keywords(env: type) -> frozenset[str]:
    """Which of the optional keywords an environment's `step` takes."""
    return frozenset(accepted_keywords(env.step, {"tokens": None, "stopped": None}))


def to_columns(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """Trajectories as the columns that `Trainer.postprocess_generator_output` works on."""
    by_env: dict[Any, list[dict[str, Any]]] = {}  # families of one environment together
    for t in trajectories:
        by_env.setdefault(envs.load(t.env_class), []).append(t.env_metrics)
    metrics = {}
    for env, measured in by_env.items():
        label = "environment" if len(by_env) == 1 else f"environment/{env.__name__}"
        averages = env.aggregate_metrics(measured)
        metrics |= {f"{label}/{name}": value for name, value in averages.items()}
    return GeneratorOutput(
        prompt_token_ids=[t.prompt_tokens for t in trajectories],
        response_ids=[t.response_tokens for t in trajectories],
        rewards=[t.rewards for t in trajectories],  # type: ignore[typeddict-item]
        loss_masks=[t.loss_mask for t in trajectories],
        stop_reasons=[t.stop_reason for t in trajectories],
        rollout_logprobs=[t.rollout_log_probs for t in trajectories],
        policy_versions=[t.policy_version for t in trajectories],
        rollout_metrics=metrics,
    )
