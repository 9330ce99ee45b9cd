"""The environments of verifiers (0.1 to 0.3): single and multi turn, with tools, judged by rubrics.

Theirs holds the conversation itself, asking a client for every response. Here the client is the
policy: it hands the question on, and waits for the answer that `step` brings.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from jaxrl.envs.adapters.adapter import Adapter, import_library
from jaxrl.envs.protocol import StepOutput
from jaxrl.envs.tags import every_tagged
from jaxrl.types import Message

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_loading = threading.RLock()


class VerifiersEnv(Adapter):
    """Run a conversation that an environment of verifiers holds, and its rubric judges at the end.

    Carried over: its messages, stop conditions, state, clean-up, the weighted reward and all
    metrics of the rubric, tools. A tool is called as Qwen and Hermes do, by
    `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, and answers in messages of the role
    "tool". A rubric that judges a whole group of rollouts at once is refused.

    Args:
        env_config: unused.
        extras: of a row that `prompts` made: `task` and `env_args`, both JSON.
        name: of the environment: the module with its `load_environment`.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras, name=name)
        if not isinstance(self.extras.get("task"), str):
            raise ValueError(
                f"environment 'verifiers:{name}' needs the column 'task', which "
                "jaxrl.envs.adapters.verifiers:prompts writes; the row's columns are "
                f"{sorted(self.extras)}"
            )
        self.env = _load(name, self.extras.get("env_args") or "{}")
        self._client: Any = None
        self._rollout: asyncio.Task[Any] | None = None
        self._seen: list[Message] = []
        self._metrics: dict[str, Any] = {}

    @classmethod
    def of(cls, name: str) -> type[Adapter]:
        """Return the class, if the environment's module is installed."""
        _find(name)
        return cls

    @classmethod
    def code_of(cls, name: str, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return `env_class`, a module, and `env_args`, which may say where its judge is."""
        args = extras.get("env_args") or "{}"
        found = {} if args == "{}" else {"env_args": args}
        return {"env_class": f"verifiers:{name}", **found}

    async def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, prompt: list[Message]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages with which the wrapped environment asks for the first response."""
        self._client = _client_class()(has_tools=bool(self.env.tool_defs))
        task = {**json.loads(self.extras["task"]), "prompt": prompt}
        self._rollout = asyncio.create_task(self.env.rollout(task, self._client, "policy", {}))
        messages = await self._asked()
        if messages is None:
            self._ended()
            raise ValueError("the environment ended before the first response")
        self._seen = messages
        return messages, {}

    async def step(self, action: str) -> StepOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hands the response in; the reward is the rubric's, when the conversation is over."""
        self.turns += 1
        self._client.answer(action)
        messages = await self._asked()
        if messages is not None and self.turns >= self.max_turns:
            self._client.end()
            messages = await self._asked()
        if messages is None:
            reward = await self._judged()
            return StepOutput(observations=[], reward=reward, done=True, metadata=self._metrics)
        before = len(self._seen)
        if messages[:before] != self._seen or messages[before]["role"] != "assistant":
            raise ValueError("the environment rewrites what was said, which cannot be trained on")
        self._seen = messages
        return StepOutput(observations=messages[before + 1 :], reward=0.0, done=False, metadata={})

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """End a conversation that is under way; their clean-up runs."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    def get_metrics(self) -> dict[str, Any]:
        """Return what every function of the rubric gave, by name."""
        return self._metrics

    async def _asked(self) -> list[Message] | None:
        """Return the messages that the wrapped environment wants answered; None = it has ended."""
        assert self._rollout is not None
        question = asyncio.ensure_future(self._client.questions.get())
        await asyncio.wait([question, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return [_message(message) for message in question.result()]
        question.cancel()
        return None

    def _ended(self) -> Any:
        """Return the state that the wrapped environment left; raise what stopped it."""
        assert self._rollout is not None
        state = self._rollout.result()
        if state.get("error") is not None:
            raise state["error"]
        return state

    async def _judged(self) -> float:
        state = self._ended()
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        self._metrics = dict(state["metrics"] or {})
        return float(state["reward"])


def prompts(
    name: str, size: int | None = None, split: str = "train", **env_args: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows of an environment's own data set, in its order.

    Args:
        name: of the environment.
        size: at most; None = all.
        split: "train", or "eval" for its evaluation set (the training set if it has none).
        **env_args: of its `load_environment`.

    Raises:
        ValueError: there is no such environment, or it cannot be trained on.
        ImportError: verifiers is not installed.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    env = _load(name, json.dumps(env_args))
    found = env.get_dataset() if split == "train" else env.get_eval_dataset()
    for row in found.select(range(min(len(found), size or len(found)))):
        prompt = row.pop("prompt")
        yield {
            "prompt": _with_tools(prompt, env.tool_defs or []),
            "env_class": f"verifiers:{name}",
            "data_source": name,
            "task": json.dumps(row),
            "env_args": json.dumps(env_args),
        }


def _with_tools(prompt: list[Message], tools: list[Any]) -> list[Message]:
    """Return the prompt with what the tools are, in its system message."""
    prompt = [_message(message) for message in prompt]
    if not tools:
        return prompt
    signatures = [
        {"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools
    ]
    text = _TOOLS.format(signatures="\n".join(map(json.dumps, signatures)))
    if prompt[0]["role"] == "system":
        text = f"{prompt.pop(0)['content']}\n\n{text}"
    return [Message(role="system", content=text), *prompt]


def _message(message: Any) -> Message:
    values = message if isinstance(message, Mapping) else message.model_dump()
    content = values["content"]
    if not isinstance(content, str | None):
        raise ValueError(f"only messages of text can be answered, got {content!r}")
    return Message(role=values["role"], content=content or "")


@functools.cache
def _client_class() -> Any:
    vf = _library("verifiers")
    types = _library("verifiers.types")

    class PolicyClient(vf.Client):
        """Stands for a model that is asked through a queue."""

        def __init__(self, has_tools: bool) -> None:
            super().__init__(None)
            self.has_tools = has_tools
            self.questions: asyncio.Queue[Any] = asyncio.Queue()
            self._answers: asyncio.Queue[str | None] = asyncio.Queue()

        def answer(self, text: str) -> None:
            self._answers.put_nowait(text)

        def end(self) -> None:
            self._answers.put_nowait(None)

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
            self.questions.put_nowait(prompt)
            text = await self._answers.get()
            if text is None:  # what ends a rollout there without an error
                raise vf.OverlongPromptError("no turn is left")
            return text

        async def from_native_response(self, response: str) -> Any:
            message = types.ResponseMessage(**_said(response, self.has_tools))
            return types.Response(id="", created=0, model="policy", message=message)

        def setup_client(self, config: Any) -> None:
            """Do nothing: there is nothing to connect to."""

        async def close(self) -> None:
            """Do nothing: there is nothing to disconnect."""

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def raise_from_native_response(self, response: str) -> None:
            """Accept every response: raise nothing, whatever its text is."""

    return PolicyClient


def _said(response: str, has_tools: bool) -> dict[str, Any]:
    """Return fields of verifiers' message: the text, and its calls where there are tools."""
    found, beside = _calls(response) if has_tools else ([], response)
    make = _library("verifiers.types").ToolCall
    calls = [make(id=f"call_{i}", **_call(call)) for i, call in enumerate(found)]
    return {
        "content": beside.strip() if calls else response,
        "tool_calls": calls or None,
        "finish_reason": "tool_calls" if calls else "stop",
        "is_truncated": False,
    }


def _calls(response: str) -> tuple[list[str], str]:
    """Return the tool calls of a response, and what is said beside them."""
    found = list(every_tagged(response, "tool_call"))
    starts, ends = [tagged.start for tagged in found], [tagged.end for tagged in found]
    gaps = zip([0, *ends], [*starts, len(response)], strict=True)
    beside = "".join(response[end:start] for end, start in gaps)
    return [tagged.content.strip() for tagged in found], beside


def _call(text: str) -> dict[str, str]:
    """Return name and arguments of a tool call.

    What is no JSON is left for the environment to refuse.
    """
    try:
        call = json.loads(text)
        return {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {"name": "", "arguments": text}


@functools.cache
def _loaded(name: str, env_args: str) -> Any:
    with _signals_left_alone():
        env = _library("verifiers").load_environment(name, **json.loads(env_args))
    if env.rubric.has_group_rewards:
        raise ValueError(
            f"environment 'verifiers:{name}' has a rubric that judges a group of rollouts at once, "
            "which is not supported; give its functions one rollout"
        )
    return env


def _load(name: str, env_args: str) -> Any:
    _find(name)
    with _loading:
        return _loaded(name, env_args)


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Keep the library from the signals while the block runs.

    Its loader takes over SIGINT and SIGTERM, which are the trainer's, and needs the main thread.
    """
    module = _library("verifiers.envs.environment")
    real = module.signal
    module.signal = SimpleNamespace(**{**vars(real), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = real


def _find(name: str) -> None:
    if not hasattr(_library("verifiers"), "load_environment"):
        raise ImportError(
            "this release of verifiers has no load_environment: pip install 'jaxrl[verifiers]'"
        )
    module = name.replace("-", "_").split("/")[-1]
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        raise ValueError(
            f"there is no environment of verifiers {name!r}: no module {module!r}. Install its "
            "package, or put a file of that name with a function load_environment on the path"
        )


def _library(module: str) -> Any:
    return import_library(module, "verifiers", "verifiers")
