"""The environments of OpenEnv: a server holds them, a session each, and speaks JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.adapters.adapter import Adapter, import_library
from jaxrl.envs.protocol import StepOutput
from jaxrl.envs.tags import last_tagged
from jaxrl.redaction import holds_key, redacted
from jaxrl.types import Message


class OpenEnvEnv(Adapter):
    """Hold a session on an OpenEnv server; its episode is the conversation.

    The first observation is a message after the prompt. The action stands in the last
    `<action>..</action>`: a JSON object as the server's schema has it (GET /schema), or with
    `action_field` anything, which becomes the value of that field. What the server refuses earns
    nothing, and its reason is the next message. A server that cannot be reached, or that breaks
    off, is a failure of the environment.

    Args:
        env_config: unused.
        extras: columns of the row. `reset`: keywords of the environment's reset, a dict or JSON,
            `seed` among them where it takes one; `action_field`; `observation_field`: the part of
            an observation that is shown; without it all of it, as JSON.
        name: the server's address, http://host:port.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras, name=name)
        reset = self.extras.get("reset") or {}
        self._reset = json.loads(reset) if isinstance(reset, str) else dict(reset)
        self._client: Any = None
        self._metrics = {"return": 0.0, "steps": 0, "invalid_actions": 0}

    @classmethod
    def of(cls, name: str) -> type[Adapter]:
        """Return the class, if the name is an address."""
        if not re.match(r"(https?|wss?)://[^/]", name):
            raise ValueError(
                f"environment 'openenv:{name}' needs the address of a server, as in "
                "'openenv:http://127.0.0.1:8000'"
            )
        if holds_key("", name):
            raise ValueError(
                f"environment '{redacted(f'openenv:{name}')}' has a key in its address, which the "
                "records of the run would show; its client has no other way for one"
            )
        _library()
        return cls

    @classmethod
    def code_of(cls, name: str, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return `env_class`, which is an address."""
        return {"env_class": f"openenv:{name}"}

    async def ready(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open a session; `close` ends it.

        Raises:
            OSError: nobody listens, or what does refuses.
        """
        await self._connect()

    async def _connect(self) -> None:
        self._client = _library().GenericEnvClient(base_url=self.name)
        await self._client.connect()

    async def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, prompt: list[Message]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Open a session and return the prompt with its first observation."""
        await self._connect()
        result = await self._client.reset(**self._reset)
        return [*prompt, Message(role="user", content=self._shown(result.observation))], {}

    async def step(self, action: str) -> StepOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send the action; reward and end are the server's."""
        self.turns += 1
        last = self.turns >= self.max_turns
        chosen, problem = self._read(action)
        result: Any = None
        if not problem:
            try:
                result = await self._client.step(chosen)
            except RuntimeError as error:  # the client's, of all that the server answers with one
                if "VALIDATION_ERROR" not in str(error):
                    raise
                problem = f"The server does not take this action: {json.dumps(chosen)}"
        if problem:
            self._metrics["invalid_actions"] += 1
            return _output(problem, 0.0, done=last)
        reward = float(result.reward or 0.0)
        self._metrics["return"] += reward
        self._metrics["steps"] += 1
        shown = self._shown(result.observation)
        return _output(shown, reward, done=bool(result.done) or last)

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Close the session on the server, which ends its episode."""
        if self._client is not None:
            await self._client.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return `return`, `steps`, `invalid_actions`."""
        return self._metrics

    def _read(self, response: str) -> tuple[dict[str, Any], str]:
        """Return the action of a response, and "" or what is wrong with it."""
        found = last_tagged(response, "action")
        if found is None:
            return {}, "There is no action in your answer. Write <action>..</action>."
        text, field = found.strip(), self.extras.get("action_field")
        if field:
            return {field: text}, ""
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
            return {}, f"The action is not a JSON object: {error}"
        return (action, "") if isinstance(action, dict) else ({}, "The action is no JSON object.")

    def _shown(self, observation: Mapping[str, Any]) -> str:
        field = self.extras.get("observation_field")
        if field is None:
            return json.dumps(observation)
        if field not in observation:
            raise ValueError(
                f"an observation of {self.name} has no field {field!r} but {sorted(observation)}"
            )
        shown = observation[field]
        return shown if isinstance(shown, str) else json.dumps(shown)


def _output(text: str, reward: float, *, done: bool) -> StepOutput:
    observations = [] if done else [Message(role="user", content=text)]
    return StepOutput(observations=observations, reward=reward, done=done, metadata={})


def _library() -> Any:
    return import_library("openenv.core", "openenv-core", "openenv")
