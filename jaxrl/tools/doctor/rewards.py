"""The same trajectories, judged again by fresh environments, earn the same."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl import config as cfg
from jaxrl.data.columns import trajectory_numbers
from jaxrl.records.alarms import RULES
from jaxrl.rollout.conversations.conversation import generator_input, sampling_of
from jaxrl.rollout.generator import generate_now
from jaxrl.tools.doctor.finding import Finding, failed, passed
from jaxrl.tools.doctor.recording import NeverSaid, RecordingEngine, ReplayingEngine
from jaxrl.tools.doctor.subject import Subject
from jaxrl.types import GeneratorInput, GeneratorOutput

FIX = RULES["reward_not_deterministic"].advice


class Judged(NamedTuple):
    """Hold what a trajectory earned: its rewards, and the sum of each term by name."""

    rewards: list[Any]
    terms: dict[str, float]


def determinism(subject: Subject) -> Finding:
    """Judge trajectories three times: as sampled, once more, and shuffled in another thread.

    Before the third time one conversation is judged alone: what counts calls is then out of phase.
    """
    trainer, config = subject.trainer, subject.run.config
    trainer.sync_weights(int(trainer.state.step))
    prompts, samples = trainer.prompts_of(0), subject.samples
    sampling = sampling_of(config.generator.sampling_params, trainer.eos_token_ids)
    batch = generator_input(prompts, samples, (config.trainer.seed, "doctor", 0), sampling)
    engine = RecordingEngine(trainer.engine)
    expected = judged(generate_now(subject.generator(engine), batch))
    about = f"{len(expected)} trajectories judged again, and again shuffled in other threads"
    order = shuffled_groups(len(batch["prompts"]), samples)
    for when, settings in ("judged again", None), ("shuffled", config):
        generator = subject.generator(
            ReplayingEngine(engine.said), settings and rethreaded(settings)
        )
        try:
            if settings is None:
                found = judged(in_a_thread(generator, batch))
            else:
                in_a_thread(generator, of_trajectories(batch, order[:1]))
                shuffled = judged(in_a_thread(generator, of_trajectories(batch, order)))
                found = [shuffled[place] for place in np.argsort(order).tolist()]
        except NeverSaid as error:
            return _diverged(subject, about, when, error)
        wrong = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
        if wrong:
            return _different(subject, about, when, (wrong, expected, found))
    return passed(0, 0, about)


def judged(output: GeneratorOutput) -> list[Judged]:
    """Return what each trajectory earned, in their order."""
    rewards = output["rewards"]
    of_row = trajectory_numbers(output.get("is_last_step", [True] * len(rewards)))
    terms = output.get("reward_terms", [{}] * len(rewards))
    found = [Judged([], {}) for _ in range(int(of_row[-1]) + 1)]
    for row, number in enumerate(of_row.tolist()):
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
    given: Any = batch
    names = ("prompts", "keys", "trajectory_ids")
    columns: Any = {name: [given[name][i] for i in numbers] for name in names}
    return GeneratorInput(**{**batch, **columns})


def rethreaded(config: cfg.TrainConfig) -> cfg.TrainConfig:
    """Put environments into threads where they were inline or in Ray, inline where in threads."""
    gym = config.environment.skyrl_gym
    threads = 4 if gym.ray_env_workers or not gym.max_env_workers else 0
    changed = {"max_env_workers": threads, "ray_env_workers": 0}
    return cfg.apply_overrides(
        config, {f"environment.skyrl_gym.{name}": value for name, value in changed.items()}
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


def _different(
    subject: Subject, about: str, when: str, found: tuple[list[int], list[Judged], list[Judged]]
) -> Finding:
    wrong, expected, again = found
    first = wrong[0]
    prompt = subject.trainer.prompts_of(0)[first // subject.samples]
    left, right = expected[first], again[first]
    terms = [n for n in {**left.terms, **right.terms} if left.terms.get(n) != right.terms.get(n)]
    what = f"reward term '{terms[0]}' of environment" if terms else "environment"
    was, now = (x.terms.get(terms[0]) if terms else _total(x) for x in (left, right))
    return failed(
        len(wrong),
        0,
        about,
        cause=f"a reward that is not deterministic: {what} '{prompt.env_class}' gave {was} to a "
        f"sample of prompt {prompt.uid}, and {now} when it was {when}",
        fix=FIX,
    )


def _diverged(subject: Subject, about: str, when: str, error: NeverSaid) -> Finding:
    names = sorted({prompt.env_class for prompt in subject.trainer.prompts_of(0)})
    return failed(
        1,
        0,
        about,
        cause=f"observations that are not deterministic: environment {', '.join(names)} answered "
        f"the same turns otherwise when {when} ({error})",
        fix=FIX,
    )


def _total(one: Judged) -> float:
    return float(sum(np.sum(x) for x in one.rewards))
