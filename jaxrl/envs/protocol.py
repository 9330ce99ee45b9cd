"""What an environment is: it sees the text of a response, rewards it and may answer."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from jaxrl.envs.tools import ToolGroup
from jaxrl.types import Message


class StepOutput(TypedDict):
    """Hold what one turn brought.

    Example: `{"observations": [], "reward": 1.0, "done": True, "metadata": {"answer": "72"}}`. With
    reward terms, weighed by `environment.reward_weights`: `{"reward": {"correct": 1.0, "format":
    0.0}, ...}`.
    """

    observations: list[Message]  # what the environment says next; empty when done
    # for the whole response, or one per response token; or several of these by name
    reward: float | list[float] | Mapping[str, float | list[float]]
    done: bool
    metadata: dict[str, Any]  # "feedback", a text on the answer: a teacher in hindsight reads it
    postprocessed_action: NotRequired[str | None]  # the beginning of the response that stands


class EnvSettings(dict[str, Any]):
    """Hold settings by name, read as `settings["search"]["topk"]` or as `settings.search.topk`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            (name, EnvSettings(value) if isinstance(value, Mapping) else value)
            for name, value in values.items()
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none"
            raise AttributeError(f"no setting {name!r}; there are {known}") from None


class Env:
    """Hold one conversation with an environment; the interface of skyrl-gym's `BaseTextEnv`.

    A subclass overrides `step`, which may be a coroutine function. If its `step` has a parameter
    `tokens`, it is given the decoded text of every response token, so that it can reward tokens
    without knowing the tokenizer; with a parameter `stopped` it learns whether the last of them is
    an end-of-sequence token. An object with the same methods need not be a subclass.

    Args:
        env_config: settings of the run, the same for every conversation.
        extras: the columns of the prompt's row besides `prompt` and `env_class`; `max_turns`, which
            is `generator.max_turns` unless the row has that column.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        self.env_config = {} if env_config is None else env_config
        self.extras = {} if extras is None else extras
        self.turns = 0
        self.max_turns = int(self.extras.get("max_turns", 1))
        self.init_tool_groups([])

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup]) -> None:
        """Offer the tools of these groups.

        Raises:
            ValueError: two groups have a tool of the same name.
        """
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup: dict[str, str] = {}
        for group in self.tool_groups:
            for name in group.get_tool_names():
                if name in self.tool_to_toolgroup:
                    other = self.tool_to_toolgroup[name]
                    raise ValueError(f"tool {name!r} is in group {other!r} and in {group.name!r}")
            self.tool_to_toolgroup.update(group.get_tool_to_group_mapping())

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Call a tool and return what it returns for these arguments."""
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(
            f"tool group {tool_group_name!r} not found; there are "
            f"{', '.join(group.name for group in self.tool_groups) or 'none'}"
        )

    def ready(self) -> None:
        """Find out whether servers answer that the environment needs; the default needs none.

        Asked before a run, of one environment of each kind. What it raises ends the run. It may be
        a coroutine function.
        """

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages that open the conversation, and anything worth recording."""
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        """Rewards a response and answers it."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def close(self) -> None:
        """Releases what the environment holds."""

    def get_metrics(self) -> dict[str, Any]:
        """Return numbers about this conversation, read after the last step."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the mean of every numeric value over the conversations that report it."""
        values: dict[str, list[float]] = {}
        for conversation in metrics:
            for name, value in conversation.items():
                if isinstance(value, numbers.Real):
                    values.setdefault(name, []).append(float(value))
        return {name: sum(column) / len(column) for name, column in values.items()}


def conversation_extras(columns: Mapping[str, Any], max_turns: int) -> dict[str, Any]:
    """Return what an environment gets of its row.

    Args:
        columns: of the row.
        max_turns: of the run; a column of that name holds instead, unless it is None: where only
            some rows have a column, Parquet gives it to all of them.
    """
    row_max_turns = columns.get("max_turns")
    return {**columns, "max_turns": max_turns if row_max_turns is None else row_max_turns}


def columns_named(error: Exception, columns: Mapping[str, Any]) -> str:
    """Return the columns of a row for the message of an error that may be of one it lacks."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    is_one = not isinstance(key, str) or not key.isidentifier() or key in columns
    return "" if is_one else f"; the row's columns are {sorted(columns)}"


def read_ground_truth(extras: Mapping[str, Any], env_class: str) -> str:
    """Return the right answer of a row: `extras["reward_spec"]["ground_truth"]`, as text.

    Args:
        extras: of the row.
        env_class: named in the error.

    Raises:
        ValueError: the row has none; says which columns it has.
    """
    reward_spec = extras.get("reward_spec")
    if not isinstance(reward_spec, Mapping) or reward_spec.get("ground_truth") is None:
        raise ValueError(
            f"environment '{env_class}' needs a column reward_spec = {{'ground_truth': ...}}; "
            f"reward_spec is {reward_spec!r} and the row's other columns are "
            f"{sorted(set(extras) - {'reward_spec'})}"
        )
    return str(reward_spec["ground_truth"])
