"""The environments of gymnasium that can be read and answered as text."""

import difflib
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.envs.adapters.adapter import Adapter, import_library
from jaxrl.envs.protocol import StepOutput
from jaxrl.envs.tags import last_tagged
from jaxrl.functions import import_function
from jaxrl.types import Message

_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
_READABLE = ("Text", "Discrete", "MultiDiscrete", "MultiBinary", "Tuple", "Dict")


class GymnasiumEnv(Adapter):
    """Run an environment that `gymnasium.make` makes; its episode is the conversation.

    The first observation follows the last message of the prompt, every other one is a message. What
    is shown: an observation that is text; else what the environment renders as text ("ansi"), a
    highlighted part as "[S]", a coloured one as "R(blue)"; else the observation's numbers; or what
    the function of the column `observe` returns. The action stands in the last
    `<action>..</action>`: the text itself, or for a Discrete space a number or one of `actions`. A
    response without a possible action is no step: it earns nothing, and is told what is possible.
    The episode ends when it is terminated or truncated.

    Args:
        env_config: unused.
        extras: columns of the row. `seed` (0) of the environment's chance, the same for all samples
            of the row; `actions`: names of a Discrete space's actions, in their order; `make`:
            keywords of `gymnasium.make`, a dict or JSON; `observe`: "pkg.module:function" of the
            environment and the observation; `action_pattern`: where an action stands in place of
            the tag, a regular expression with one group, of which the last match counts; one that
            takes long on some text (as `(a+)+b`) holds up the whole run: no time limit ends it.
        name: an id of gymnasium, or "module:id" to import the module that registers it.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras, name=name)
        observe = self.extras.get("observe")
        self.env = _make(name, self.extras.get("make"))
        self._observe = import_function(observe, "observe") if observe else _observer(self.env)
        self._seed = int(self.extras.get("seed") or 0)  # None: other rows have one
        self._actions = _Actions(
            self.env, name, self.extras.get("actions"), self.extras.get("action_pattern")
        )
        self._metrics = {"return": 0.0, "steps": 0, "invalid_actions": 0, "truncated": 0.0}

    @classmethod
    def of(cls, name: str) -> type[Adapter]:
        """Return the class, if gymnasium knows the environment."""
        _find(name)
        return cls

    @classmethod
    def code_of(cls, name: str, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return `observe`, and `env_class` with a module in it.

        That of an environment of the old gym, too, whose name and module are in `make`.
        """
        found = {"observe": extras["observe"]} if extras.get("observe") else {}
        if ":" in name or name.startswith("GymV2"):
            found["env_class"] = f"gymnasium:{name}"
        return found

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Reset the environment and return the prompt with the first observation."""
        observation, info = self.env.reset(seed=self._seed)
        shown = self._observe(self.env, observation)
        *before, last = prompt
        if last["role"] != "user" or not isinstance(last["content"], str):
            return [*prompt, {"role": "user", "content": shown}], info
        return [*before, {**last, "content": f"{last['content']}\n\n{shown}"}], info

    def step(self, action: str) -> StepOutput:
        """Take the action that the response names; its reward is that of the step."""
        self.turns += 1
        last = self.turns >= self.max_turns
        chosen, problem = self._actions.read(action)
        if problem:
            self._metrics["invalid_actions"] += 1
            return _answer(problem, 0.0, done=last, metadata={"action": None})
        observation, reward, terminated, truncated, _ = self.env.step(chosen)
        reward = float(reward)
        self._metrics["return"] += reward
        self._metrics["steps"] += 1
        self._metrics["truncated"] = float(truncated)
        done = terminated or truncated or last
        shown = "" if done else self._observe(self.env, observation)
        return _answer(shown, reward, done=bool(done), metadata={"action": chosen})

    def close(self) -> None:
        """Close Gymnasium's environment, which frees what it holds, such as a window."""
        self.env.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return `return`, `steps`, `invalid_actions`, and `truncated`.

        The last one says that gymnasium ended the episode.
        """
        return self._metrics


def prompts(
    name: str,
    size: int,
    seed: int = 0,
    *,
    instruction: str | None = None,
    actions: Sequence[str] | None = None,
    action_pattern: str | None = None,
    observe: str | None = None,
    **make: Any,
) -> Iterator[dict[str, Any]]:
    """Yield rows of one environment, each with a seed of its own.

    Args:
        name: id in gymnasium, for example "FrozenLake-v1".
        size: number of rows.
        seed: 0 to 2000; different seeds give different rows.
        instruction: what to do, before the first observation; None = how to write an action.
        actions, action_pattern, observe, make: see `GymnasiumEnv`.

    Raises:
        ValueError: gymnasium has no such environment, or text does not suit it.
        ImportError: gymnasium is not installed.
    """
    if not 0 <= seed <= 2000 or not 0 < size <= 1_000_000:
        raise ValueError(f"seed must be 0 to 2000, size 1 to 1000000, got {seed} and {size}")
    GymnasiumEnv.of(name)
    columns: dict[str, Any] = {
        "actions": actions,
        "action_pattern": action_pattern,
        "observe": observe,
    }
    env = GymnasiumEnv(extras={**columns, "seed": seed, "make": make}, name=name)
    text = env._actions.instruction if instruction is None else instruction
    env.close()
    columns = {key: value for key, value in columns.items() if value is not None}
    if make:
        columns["make"] = json.dumps(make)
    for row in range(size):
        yield {
            "prompt": [{"role": "user", "content": text}],
            "env_class": f"gymnasium:{name}",
            "data_source": name,
            "seed": seed * 1_000_000 + row,
            **columns,
        }


class _Actions:
    """Read actions that are text.

    Attributes:
        instruction: what is possible, for the policy to read.
    """

    def __init__(
        self, env: Any, name: str, names: Sequence[str] | None, pattern: str | None
    ) -> None:
        space, kind = env.action_space, type(env.action_space).__name__
        if kind not in ("Discrete", "Text"):
            raise ValueError(
                f"environment 'gymnasium:{name}' has actions of the space {space}; only Discrete "
                "and Text can be read from a response. Wrap it in one that takes text"
            )
        self.space, self.names = space, {}
        self.pattern = _compiled(pattern) if pattern else None
        if kind == "Text":
            if names:
                raise ValueError(f"environment 'gymnasium:{name}' has actions of text, not {names}")
            self.instruction = "" if pattern else "Answer with <action>your action</action>."
            return
        numbers = range(int(space.start), int(space.start) + int(space.n))
        if names and len(names) != len(numbers):
            raise ValueError(
                f"environment 'gymnasium:{name}' has {len(numbers)} actions, and {len(names)} "
                f"names: {list(names)}"
            )
        labels = [str(word) for word in names or numbers]
        self.names = dict(zip(map(str.casefold, labels), numbers, strict=True))
        self.names |= {str(number): number for number in numbers}
        many = len(labels) > 20
        choice = f"{labels[0]} to {labels[-1]}" if many and not names else ", ".join(labels)
        how = "" if pattern else f" Answer with <action>{labels[0]}</action>."
        self.instruction = f"The actions are {choice}.{how}"

    def read(self, response: str) -> tuple[Any, str]:
        """Return the action of a response, and "" or what is wrong with it."""
        text = self._find(response)
        if text is None:
            return None, f"There is no action in your answer. {self.instruction}"
        if not self.names:
            fits = self.space.contains(text)
            return text, "" if fits else f"{text!r} is not a possible action. {self.instruction}"
        action = self.names.get(text.casefold())
        if action is None:
            return None, f"{text!r} is not an action. {self.instruction}"
        return action, ""

    def _find(self, response: str) -> str | None:
        if self.pattern is None:
            last = last_tagged(response, "action")
        else:
            last = next(reversed(self.pattern.findall(response)), None)
        return None if last is None else last.strip()


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"action_pattern {pattern!r} is not a regular expression: {error}"
        ) from error
    if compiled.groups != 1:
        raise ValueError(f"action_pattern {pattern!r} must have one group, around the action")
    return compiled


def _answer(text: str, reward: float, *, done: bool, metadata: dict[str, Any]) -> StepOutput:
    observations = [] if done else [Message(role="user", content=text)]
    return StepOutput(observations=observations, reward=reward, done=done, metadata=metadata)


def _observer(env: Any) -> Callable[[Any, Any], str]:
    """Return the function that shows an environment as text."""
    space = env.observation_space
    kind = type(space).__name__
    if kind == "Text":
        return lambda env, observation: observation
    if env.render_mode == "ansi":
        return lambda env, observation: _plain(env.render())
    if kind in _READABLE or (kind == "Box" and len(space.shape) == 1):
        return lambda env, observation: json.dumps(_listed(observation))
    raise ValueError(
        f"environment 'gymnasium:{env.spec.id}' has observations of the space {space}, which are "
        "no text; set the column observe='pkg.module:function' to a function of the environment "
        "and the observation that returns text"
    )


def _plain(rendered: str) -> str:
    """Tell by signs what a rendering tells by colours."""

    def replace(match: re.Match[str]) -> str:
        code = int(match[1].split(";")[0])
        if code >= 40:
            return f"[{match[2]}]"
        return f"{match[2]}({_COLOURS[code - 30]})" if 30 <= code <= 38 else match[2]

    return _COLOURED.sub(replace, rendered).strip("\n")


def _listed(observation: Any) -> Any:
    """Return an observation as JSON has it."""
    if isinstance(observation, Mapping):
        return {str(key): _listed(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return [_listed(value) for value in observation]
    return observation.tolist() if hasattr(observation, "tolist") else observation


def _make(name: str, keywords: str | Mapping[str, Any] | None) -> Any:
    """Make the environment, rendered as text if its observations are none and it can be."""
    text = keywords if isinstance(keywords, str) else json.dumps(dict(keywords or {}))
    library = _library()
    try:
        settings = json.loads(text) | _rendering(name, text)
        return library.make(name, **settings)
    except (TypeError, ValueError, library.error.Error) as error:
        raise ValueError(
            f"gymnasium cannot make environment {name!r} with {text}: {error}"
        ) from error


@functools.cache
def _rendering(name: str, keywords: str) -> dict[str, str]:
    settings = json.loads(keywords)
    env = _library().make(name, **settings)
    env.close()
    text = type(env.observation_space).__name__ == "Text"
    able = "ansi" in env.metadata.get("render_modes", ())
    return {"render_mode": "ansi"} if able and not text and "render_mode" not in settings else {}


def _find(name: str) -> None:
    module, _, env_id = name.rpartition(":")
    library = _library()
    try:
        if module:
            importlib.import_module(module)
        library.spec(env_id)
    except (ModuleNotFoundError, library.error.Error) as error:
        near = difflib.get_close_matches(env_id, library.registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"gymnasium has no environment {name!r} ({error}){hint} One of your own is written "
            "'gymnasium:pkg.module:Name-v0', with the module that registers it"
        ) from error


def _library() -> Any:
    return import_library("gymnasium", "gymnasium", "gymnasium")
