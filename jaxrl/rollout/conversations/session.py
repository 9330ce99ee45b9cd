"""A conversation's environment, and what becomes of its mistakes."""

import contextlib
import functools
import inspect
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

import jaxrl
from jaxrl import envs, functions
from jaxrl.envs import StepOutput
from jaxrl.envs.protocol import conversation_extras
from jaxrl.registry import accepted_keywords
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.reward_terms import PLAIN, Reward, RewardTerms, named
from jaxrl.types import Message, Prompt

_OURS = str(Path(jaxrl.__file__).parent) + os.sep


class EnvironmentFailure(Exception):
    """Signal that an environment raised, hung, or answered with what cannot be used."""


class JudgedTurn(NamedTuple):
    """Hold what the environment was told, and what it and the user's functions gave for it."""

    text: str
    tokens: list[str]
    stopped: bool
    done: bool
    terms: dict[str, Reward]


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
        self.record, self.turns = record, list[JudgedTurn]()
        self._turns, self.max_turns = 0, 1
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
        with self.blamed(when):
            messages, _ = opening
        return messages

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
        """
        when = f"with the answer {text!r}"
        asked = getattr(envs.load(self.prompt.env_class), "step", None)
        step = await self._ask(when, step_call(self._env, text, list(tokens), stopped), asked)
        with self.blamed(when, asked):
            rewards = named(step["reward"], PLAIN)
            terms = {name: _checked(x, len(tokens), name) for name, x in rewards.items()}
            observations, done = step.get("observations") or [], bool(step["done"])
        terms |= await self._judge(text, tokens, stopped, done=done, taken=terms)
        if self.record:
            self.turns.append(JudgedTurn(text, list(tokens), stopped, done, terms))
        checked = {"reward": self._weigh(terms), "observations": observations, "done": done}
        return cast(StepOutput, {**step, **checked})

    async def _judge(
        self,
        text: str,
        tokens: Sequence[str],
        stopped: bool,
        *,
        done: bool,
        taken: Mapping[str, Reward],
    ) -> dict[str, Reward]:
        """Return the reward terms of the user's functions."""
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
        found: dict[str, Reward] = {}
        for function, call, keywords in calls:
            when = f"in reward function '{function}' with the answer {text!r}"
            there = self.pool.beside(self._env, call)
            rewards = await self._ask(when, functools.partial(there, **keywords), call)
            with self.blamed(when, call):
                for name, x in named(rewards, function).items():
                    if name in taken or name in found:
                        raise ValueError(f"gave the reward term '{name}', which is given already")
                    found[name] = _checked(x, len(tokens), name)
        return found

    def _weigh(self, terms: Mapping[str, Reward]) -> Reward:
        """Return the reward of a turn, and record its terms."""
        if not self.terms.weights and terms.keys() == {PLAIN}:
            return terms[PLAIN]
        for name, x in terms.items():
            self.earned[name] = self.earned.get(name, 0.0) + float(np.sum(x))
        label = f"environment '{self.prompt.env_class}' on prompt {self.prompt.uid}"
        return self.terms.weigh(terms, label)

    async def metrics(self) -> dict[str, Any]:
        """Return the environment's numbers about the conversation."""
        when = "in get_metrics"
        found = await self._ask(when, self._env.get_metrics)
        with self.blamed(when):
            return dict(found)

    async def close(self) -> None:
        """Let the environment release what it holds; only the first call does."""
        env, self._env = self._env, None
        if env is not None:
            await self._ask("in close", env.close)

    async def _ask(self, when: str, call: Any, asked: Any = None) -> Any:
        started = time.perf_counter()
        try:
            with self.blamed(when, asked):
                return await self.pool.run(call)
        finally:
            self.seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def blamed(self, when: str, asked: Any = None) -> Iterator[None]:
        """Turn what the block raises into the environment's failure; see `place_of` for `asked`."""
        try:
            yield
        except Exception as error:
            name, uid = self.prompt.env_class, self.prompt.uid
            place = place_of(error, asked)
            where = f" ({place})" if place else ""
            message = f"environment '{name}' failed on prompt {uid} {when}: {error!r}{where}"
            raise EnvironmentFailure(message) from error


def step_call(env: Any, text: str, tokens: list[str], stopped: bool) -> Callable[[], Any]:
    """Return the call of an environment's `step`, with what its signature names."""
    details = {"tokens": tokens, "stopped": stopped}
    asked = _step_keywords(type(env))
    return functools.partial(env.step, text, **{k: v for k, v in details.items() if k in asked})


@functools.cache
def _step_keywords(env: Any) -> frozenset[str]:
    """Return which of the optional keywords an environment's `step` takes."""
    return frozenset(accepted_keywords(env.step, {"tokens": None, "stopped": None}))


def _checked(reward: Any, tokens: int, term: str) -> Reward:
    """Check a reward and return it as Python's numbers."""
    rewards = np.asarray(reward, np.float64).tolist()  # may be numpy's numbers
    _check_rewards(rewards, tokens, "" if term == PLAIN else f" for '{term}'")
    return rewards


def _check_rewards(rewards: Any, tokens: int, term: str) -> None:
    if not np.isfinite(rewards).all():
        raise ValueError(f"gave the reward {rewards!r}{term}; rewards must be finite")
    if np.ndim(rewards) > 1 or (np.ndim(rewards) == 1 and len(rewards) != tokens):
        raise ValueError(
            f"gave {len(rewards)} rewards{term} for {tokens} tokens; give one per token, or a "
            "number"
        )


# ---- where in the user's files something went wrong


def place_of(error: BaseException, asked: Callable[..., Any] | None = None) -> str:
    """Return `file:line` of an error, or "" where no file of the user's is involved.

    Args:
        error: the innermost line of the user's that it went through; an attribute `place` holds
            instead, of an error that was raised in another process.
        asked: where no line was, this function is to blame: for what it returned.
    """
    if place := getattr(error, "place", ""):
        return place
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if _is_users(f.filename)]
    return lines[-1] if lines else _place_of_function(asked)


def _place_of_function(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def _is_users(file: str) -> bool:
    return not file.startswith((*functions.INSTALLED, _OURS, "<"))
