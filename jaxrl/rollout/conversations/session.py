"""A conversation's environment, and what becomes of its mistakes."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxrl import envs
from jaxrl.envs import StepOutput
from jaxrl.envs.protocol import columns_named, conversation_extras
from jaxrl.functions import place_of
from jaxrl.registry import accepted_keywords
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.reward_terms import (
    PLAIN,
    NoOpinion,
    Reward,
    RewardTerms,
    may_abstain,
    named,
)
from jaxrl.types import Message, Prompt

_STEP = "return {'observations': [], 'reward': 1.0, 'done': True}"
_MESSAGES = "[{'role': 'user', 'content': '...'}]"


class EnvironmentFailure(Exception):
    """Signal that an environment raised, hung, or answered with what cannot be used.

    An engine that did the last is counted among them.

    `place` is the `file:line` of the user's that is to blame, or "".
    """

    place = ""


class UnusableAnswer(ValueError):
    """Say what is wrong with what the environment, a reward function or an engine returned."""


class JudgedTurn(NamedTuple):
    """Hold what the environment was told, and what it and the user's functions gave for it."""

    text: str
    tokens: list[str]
    stopped: bool
    done: bool
    terms: dict[str, Reward | None]


class Session:
    """Hold one conversation with an environment, whose calls run in a pool.

    Args:
        prompt: its first messages.
        pool: makes the environment and runs its calls.
        env_config: settings of the environment.
        terms: weights of rewards, and the user's functions.
        record: keep the turns.

    Attributes:
        turns: so far, if they are kept.
        seconds: waited for its calls so far.
        earned: the sum of each reward term so far, unweighted; empty where there is but the
            environment's own reward.
        feedback: what the environment had to say of the last answer; "" = nothing.
    """

    def __init__(
        self,
        prompt: Prompt,
        pool: EnvironmentPool,
        env_config: Mapping[str, Any] | None,
        terms: RewardTerms | None = None,
        *,
        record: bool = False,
    ) -> None:
        self.prompt, self.pool, self.env_config = prompt, pool, env_config
        self.terms = RewardTerms() if terms is None else terms
        self.seconds = 0.0
        self.earned: dict[str, float] = {}
        self.feedback = ""
        self.record, self.turns = record, list[JudgedTurn]()
        self._turns, self.max_turns = 0, 1
        self._instant = prompt.env_class in envs.INSTANT
        self._env: Any = None

    async def open(self, max_turns: int) -> list[Message]:
        """Make the environment and return the messages that open the conversation.

        Args:
            max_turns: for environments that count turns; a column of the row's own holds instead.
        """
        self.max_turns = max_turns
        when, extras = "at the start", conversation_extras(self.prompt.extras, max_turns)
        make = functools.partial(self.pool.make, self.prompt.env_class, extras, self.env_config)
        self._env = await self._ask(when, make)
        opening = await self._ask(when, functools.partial(self._env.init, self.prompt.messages))
        with self.blamed(when, getattr(type(self._env), "init", None)):
            return _opening(opening)

    async def step(self, text: str, tokens: Sequence[str], stopped: bool) -> StepOutput:
        """Take a response to the environment.

        Args:
            text: of the response.
            tokens: text of each of its tokens.
            stopped: whether the last one is an end-of-sequence token.

        Returns:
            Its answer, with `reward` a finite float, or a list of one for each token: the weighted
            sum of all reward terms.

        Raises:
            RewardTermError: the terms are not those that have a weight.
            EnvironmentFailure: the environment or a function failed, or none has an opinion.
        """
        when = f"with the answer {text!r}"
        asked = getattr(envs.load(self.prompt.env_class), "step", None)
        step = await self._ask(when, step_call(self._env, text, list(tokens), stopped), asked)
        with self.blamed(when, asked):
            _check_step(step)
            rewards = named(step["reward"], PLAIN)
            given = {name: _checked(x, len(tokens), name) for name, x in rewards.items()}
            done = bool(step["done"])
            observations = [] if done else step.get("observations") or []
            self.feedback = _feedback(step.get("metadata"))
        found = await self._judge(text, tokens, stopped, done=done, taken=given)
        terms: dict[str, Reward | None] = {**given, **found}
        if self.record:
            self.turns.append(JudgedTurn(text, list(tokens), stopped, done, terms))
        try:
            reward = self._weigh(terms)
        except NoOpinion as error:
            raise self._failure(error, when, asked) from error
        checked = {"reward": reward, "observations": observations, "done": done}
        return cast(StepOutput, {**step, **checked})

    async def _judge(
        self,
        text: str,
        tokens: Sequence[str],
        stopped: bool,
        *,
        done: bool,
        taken: Mapping[str, Reward],
    ) -> dict[str, Reward | None]:
        """Return the reward terms of the user's functions; None = no opinion."""
        self._turns += 1
        calls = self.terms.calls(
            action=text,
            tokens=list(tokens),
            stopped=stopped,
            turn=self._turns,
            prompt=self.prompt.messages,
            extras=self.prompt.extras,
            done=done or self._turns >= self.max_turns,
            reward=taken[PLAIN] if taken.keys() == {PLAIN} else dict(taken),
        )
        found: dict[str, Reward | None] = {}
        for function, call, keywords in calls:
            when = f"in reward function '{function}' with the answer {text!r}"
            there = self.pool.beside(self._env, call)
            judge = functools.partial(there, **keywords)
            rewards = await self._ask(when, judge, call, instant=False)
            with self.blamed(when, call):
                for name, x in named(rewards, function).items():
                    if name in taken or name in found:
                        raise UnusableAnswer(
                            f"gave the reward term '{name}', which is given already"
                        )
                    silent = x is None and may_abstain(call)
                    found[name] = None if silent else _checked(x, len(tokens), name)
        return found

    def _weigh(self, terms: Mapping[str, Reward | None]) -> Reward:
        """Return the reward of a turn, and record its terms."""
        if not self.terms.weights and terms.keys() == {PLAIN}:
            return cast(Reward, terms[PLAIN])  # an environment has an opinion
        for name, x in terms.items():
            if x is not None:
                self.earned[name] = self.earned.get(name, 0.0) + float(np.sum(x))
        label = f"environment '{self.prompt.env_class}' on {self.prompt.place}"
        return self.terms.weigh(terms, label)

    async def metrics(self) -> dict[str, Any]:
        """Return the environment's numbers about the conversation."""
        when = "in get_metrics"
        found = await self._ask(when, self._env.get_metrics)
        with self.blamed(when):
            return dict(found)

    @property
    def is_open(self) -> bool:
        """Return whether there is an environment to close."""
        return self._env is not None

    async def close(self) -> None:
        """Let the environment release what it holds; only the first call does."""
        env, self._env = self._env, None
        if env is not None:
            await self._ask("in close", env.close)

    async def _ask(
        self, when: str, call: Any, asked: Any = None, *, instant: bool | None = None
    ) -> Any:
        """Run a call; `instant` is that of the environment where it is not given."""
        started = time.perf_counter()
        try:
            instant = self._instant if instant is None else instant
            return await self.pool.run(call, instant=instant)
        except Exception as error:
            raise self._failure(error, when, asked) from error
        finally:
            self.seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def blamed(self, when: str, asked: Any = None) -> Iterator[None]:
        """Turn what the block raises into the environment's failure; see `place_of` for `asked`."""
        try:
            yield
        except Exception as error:
            raise self._failure(error, when, asked) from error

    def _failure(self, error: Exception, when: str, asked: Any) -> EnvironmentFailure:
        name, row = self.prompt.env_class, self.prompt.place
        place = place_of(error, asked)
        where = f" ({place})" if place else ""
        what = str(error) if isinstance(error, UnusableAnswer | NoOpinion) else repr(error)
        what += columns_named(error, self.prompt.extras)
        failure = EnvironmentFailure(f"environment '{name}' failed on {row} {when}: {what}{where}")
        failure.place = place
        return failure


def step_call(env: Any, text: str, tokens: list[str], stopped: bool) -> Callable[[], Any]:
    """Return the call of an environment's `step`, with what its signature names."""
    details = {"tokens": tokens, "stopped": stopped}
    asked = _step_keywords(type(env))
    return functools.partial(env.step, text, **{k: v for k, v in details.items() if k in asked})


@functools.cache
def _step_keywords(env: Any) -> frozenset[str]:
    """Return which of the optional keywords an environment's `step` takes."""
    return frozenset(accepted_keywords(env.step, {"tokens": None, "stopped": None}))


def _opening(found: Any) -> list[Message]:
    """Return the messages of what `init` gave."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UnusableAnswer(f"init {_gave(found)}; it must return a pair: return prompt, {{}}")
    return found[0]


def _feedback(metadata: Any) -> str:
    """Return what the environment says of an answer in words; "" = nothing."""
    found = metadata.get("feedback") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, str) else ""


def _check_step(step: Any) -> None:
    """Refuse an answer of `step` that is not of the form of `StepOutput`."""
    if not isinstance(step, Mapping):
        raise UnusableAnswer(f"step {_gave(step)}; it must return a dict: {_STEP}")
    if missing := [name for name in ("reward", "done") if name not in step]:
        raise UnusableAnswer(
            f"step gave no {' and no '.join(map(repr, missing))}, only {[*step]}: {_STEP}"
        )
    said = step.get("observations")
    if step["done"] or said is None:
        return  # nobody reads them
    if len(said) and not (isinstance(said, Sequence) and all(isinstance(m, Mapping) for m in said)):
        raise UnusableAnswer(f"step gave the observations {said!r:.80}; give messages: {_MESSAGES}")


def _gave(found: Any) -> str:
    if found is None:
        return "returned None: is a `return` missing?"
    size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
    return f"returned a {type(found).__name__}{size}"


def _checked(reward: Any, tokens: int, term: str) -> Reward:
    """Check a reward and return it as Python's numbers."""
    of_term = "" if term == PLAIN else f" for '{term}'"
    if reward is None:
        hint = "" if term == PLAIN else ", where that is no opinion annotate it `-> float | None`"
        raise UnusableAnswer(f"gave None{of_term} as the reward: is a `return` missing?{hint}")
    given = np.asarray(reward)
    if given.dtype.kind in "USM" or (given.dtype.kind == "O" and not _are_numbers(reward)):
        raise UnusableAnswer(f"gave the reward {reward!r:.80}{of_term}; give a number: 0.5")
    rewards = given.astype(np.float64)
    _check_rewards(rewards, tokens, of_term)
    return rewards.tolist()  # Python's numbers


def _are_numbers(reward: Any) -> bool:
    """Return whether Python has numbers that numpy has no kind for, as Decimal and Fraction."""
    values = reward if isinstance(reward, Sequence) else [reward]
    return all(hasattr(value, "__float__") for value in values)


def _check_rewards(rewards: np.ndarray, tokens: int, of_term: str) -> None:
    if not np.isfinite(rewards).all():
        raise UnusableAnswer(
            f"gave the reward {rewards.tolist()!r}{of_term}; rewards must be finite"
        )
    if rewards.ndim > 1 or (rewards.ndim == 1 and len(rewards) != tokens):
        raise UnusableAnswer(
            f"gave {len(rewards)} rewards{of_term} for {tokens} tokens; give one per token, or a "
            "number"
        )
