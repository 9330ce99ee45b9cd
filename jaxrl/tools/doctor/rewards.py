"""The same trajectories, judged again by fresh environments, earn the same."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from jaxrl import config as cfg
from jaxrl.data.columns import trajectory_numbers
from jaxrl.records.alarms import RULES
from jaxrl.rollout.conversations.conversation import generator_input, sampling_of
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.tools.doctor.examined_run import Answers, ExaminedRun, RecordingEngine
from jaxrl.tools.doctor.finding import Finding, failed, passed
from jaxrl.types import GeneratorInput, GeneratorOutput

FIX = RULES["reward_not_deterministic"].advice


class Judged(NamedTuple):
    """Hold what a trajectory earned: its rewards, and the sum of each term by name."""

    rewards: list[Any]
    terms: dict[str, float]

    def term(self, name: str | None) -> float | None:
        """Return the sum of a term; that of all rewards where the name is None."""
        if name is None:
            return float(sum(np.sum(reward) for reward in self.rewards))
        return self.terms.get(name)


def determinism(examined: ExaminedRun) -> Finding:
    """Judge trajectories three times: as sampled, once more, and shuffled in another thread.

    Before the third time one conversation is judged alone: what counts calls is then out of phase.
    """
    trainer, config = examined.trainer, examined.config
    trainer.sync_weights(int(trainer.state.step))
    prompts, samples = trainer.prompts_of(0), examined.samples
    sampling = sampling_of(config.generator.sampling_params, trainer.eos_token_ids)
    batch = generator_input(prompts, samples, (config.trainer.seed, "doctor", 0), sampling)
    engine = RecordingEngine(trainer.engine)
    first = judged(generate_now(examined.generator(engine), batch))
    about = f"{len(first)} trajectories judged again, and again shuffled in other threads"
    replay = ReplayingEngine(engine.answers)
    environments = ", ".join(sorted({prompt.env_class for prompt in prompts}))

    def wrong(found: list[Judged], when: str) -> Finding | None:
        different = [i for i, (a, b) in enumerate(zip(first, found, strict=True)) if a != b]
        if not different:
            return None
        number = different[0]
        prompt, before, now = prompts[number // samples], first[number], found[number]
        terms = [name for name in before.terms | now.terms if before.term(name) != now.term(name)]
        name = terms[0] if terms else None
        what = f"reward term '{name}' of environment" if terms else "environment"
        return failed(
            len(different),
            0,
            about,
            cause=f"a reward that is not deterministic: {what} '{prompt.env_class}' gave "
            f"{before.term(name)} to a sample of prompt {prompt.uid}, and {now.term(name)} when it "
            f"was {when}",
            fix=FIX,
        )

    when = "judged again"
    try:
        again = judged(in_a_thread(examined.generator(replay), batch))
        if finding := wrong(again, when):
            return finding
        when, order = "shuffled", shuffled_groups(len(batch["prompts"]), samples)
        generator = examined.generator(replay, rethreaded(config))
        in_a_thread(generator, of_trajectories(batch, order[:1]))
        shuffled = judged(in_a_thread(generator, of_trajectories(batch, order)))
    except NeverAsked as error:
        return failed(
            1,
            0,
            about,
            cause=f"observations that are not deterministic: environment {environments} answered "
            f"the same turns otherwise when {when} ({error})",
            fix=FIX,
        )
    in_order = [shuffled[place] for place in np.argsort(order).tolist()]
    return wrong(in_order, when) or passed(0, 0, about)


def judged(output: GeneratorOutput) -> list[Judged]:
    """Return what each trajectory earned, in their order."""
    rewards = output["rewards"]
    numbers = trajectory_numbers(output.get("is_last_step", [True] * len(rewards)))
    terms = output.get("reward_terms", [{}] * len(rewards))
    found = [Judged([], {}) for _ in range(int(numbers[-1]) + 1)]
    for row, number in enumerate(numbers.tolist()):
        found[number].rewards.append(np.asarray(rewards[row], np.float64).tolist())
        found[number].terms.update(terms[row])
    return found


def shuffled_groups(count: int, samples: int) -> list[int]:
    """Return numbers of trajectories: prompts, and the samples of each, in another order.

    The samples of a prompt stay neighbours, as generators may expect.
    """
    rng = np.random.default_rng(3)
    groups = rng.permutation(count // samples).tolist()
    return [samples * group + int(i) for group in groups for i in rng.permutation(samples)]


def of_trajectories(batch: GeneratorInput, numbers: Sequence[int]) -> GeneratorInput:
    """Return the trajectories of these numbers, in this order."""
    chosen: Any = dict(batch)
    for name in ("prompts", "keys", "trajectory_ids"):
        chosen[name] = [chosen[name][i] for i in numbers]
    return chosen


def rethreaded(config: cfg.TrainConfig) -> cfg.TrainConfig:
    """Put environments into threads where they were inline or in Ray, inline where in threads."""
    gym = config.environment.skyrl_gym
    threads = 4 if gym.ray_env_workers or not gym.max_env_workers else 0
    return cfg.apply_overrides(
        config,
        {
            "environment.skyrl_gym.max_env_workers": threads,
            "environment.skyrl_gym.ray_env_workers": 0,
        },
    )


def in_a_thread(generator: Any, batch: GeneratorInput) -> GeneratorOutput:
    """Call `generate_now` in a thread of its own; raise what it raises."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(generate_now(generator, batch))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="jaxrl-doctor")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class NeverAsked(Exception):
    """Say that a conversation went where it did not go before."""


class ReplayingEngine:
    """Answer as another engine did, without a model."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Return what was answered to the same requests, as futures; see `Engine`."""
        return [[self._answer(request, key) for key in request.keys] for request in requests]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return what was answered to the same requests; see `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _answer(self, request: Request, key: tuple[int, int]) -> Future[Completion]:
        future: Future[Completion] = Future()
        found = self.answers.get((request.prompt_tokens, key))
        if found is None:
            future.set_exception(NeverAsked(f"prompt {request.prompt_tokens[-8:]}"))
        else:
            future.set_result(found)
        return future
