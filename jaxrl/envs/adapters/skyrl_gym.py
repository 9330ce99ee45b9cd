"""The environments of skyrl-gym as they are: its own, and what `skyrl_gym.register` knows."""

import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.adapters.adapter import Adapter, import_library
from jaxrl.envs.protocol import Env, EnvSettings, StepOutput
from jaxrl.types import Message

_WITHOUT_SANDBOX = "lcb", "searchcode"


class SkyRLGymEnv(Adapter):
    """Run an environment that `skyrl_gym.make` makes.

    It is given what SkyRL gives it: `env_config` is its own group of `environment.skyrl_gym`, by
    its id, and `extras` the columns of the row with `max_turns`. Messages, rewards, postprocessed
    actions, metrics and their aggregation are its own.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras, name=name)
        settings = self.env_config.get(name) or EnvSettings({})
        self.env = _library().make(name, env_config=settings, extras=dict(self.extras))

    @classmethod
    def of(cls, name: str) -> type[Adapter]:
        """Return a class that aggregates metrics as skyrl-gym's environment does."""
        registry = _library().envs.registration.registry
        if name not in registry:
            near = difflib.get_close_matches(name, registry, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"skyrl-gym has no environment {name!r}; {hint}it has {', '.join(registry)}. "
                "Another one is registered with skyrl_gym.register before the run is started, or "
                "named by its class: 'pkg.module:Class'"
            )
        made_by = registry[name].entry_point
        if isinstance(made_by, str):
            module, _, attribute = made_by.partition(":")
            made_by = getattr(importlib.import_module(module), attribute)
        return _adapter_of(made_by)

    @classmethod
    def code_of(cls, name: str, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return `env_class` of one that runs programs of the model without a sandbox."""
        return {"env_class": f"skyrl_gym:{name}"} if name in _WITHOUT_SANDBOX else {}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Open the conversation as skyrl-gym's environment does."""
        return self.env.init(prompt)

    def step(self, action: str) -> StepOutput:
        """Let skyrl-gym's environment judge the response and answer it."""
        return self.env.step(action)

    def close(self) -> None:
        """Let skyrl-gym's environment release what it holds."""
        self.env.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of skyrl-gym's environment about the conversation."""
        return self.env.get_metrics()


@functools.cache
def _adapter_of(made_by: Any) -> type[Adapter]:
    aggregate = getattr(made_by, "aggregate_metrics", Env.aggregate_metrics)
    name = getattr(made_by, "__name__", SkyRLGymEnv.__name__)
    return type(name, (SkyRLGymEnv,), {"aggregate_metrics": staticmethod(aggregate)})


def _library() -> Any:
    return import_library("skyrl_gym", "skyrl-gym", "envs")
