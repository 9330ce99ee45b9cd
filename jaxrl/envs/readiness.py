"""Whether every environment that data sets name can be made, found out before work is lost."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl import envs
from jaxrl.config_error import fail
from jaxrl.envs.json_request import RequestError
from jaxrl.envs.protocol import columns_named, conversation_extras
from jaxrl.redaction import redacted
from jaxrl.types import Prompt


class ServerAwayError(ConnectionError):
    """Signals that nothing is wrong but servers that do not answer.

    They may be back at the next start.
    """


def refuse_code(prompts: Sequence[Prompt], named: str) -> None:
    """Refuse rows of files that choose code or servers; nothing of theirs is imported.

    Args:
        prompts: of files.
        named: environment that the config itself names.

    Raises:
        ConfigError: names the row, its column and value, and the field that allows it.
    """
    for prompt in prompts:
        for column, value in envs.code_of(prompt.env_class, prompt.extras, named).items():
            fail(
                "environment.rows_may_name_code",
                False,
                f"{prompt.place} has {column}={value!r}, which chooses code that is run or a "
                "server that is asked. Set True if you trust whoever wrote the file; or name "
                "the environment in environment.env_class, or several with "
                "jaxrl.envs.register, and write those names into the rows",
            )


def check_environments(
    prompts: Sequence[Prompt],
    env_config: Mapping[str, Any] | None,
    max_turns: int,
    *,
    make: bool = True,
) -> None:
    """Make an environment for the first prompt of each kind, and ask whether it is ready.

    Args:
        prompts: of all data sets.
        env_config: settings of the run.
        max_turns: for environments that count turns.
        make: False only finds the classes: they are made in other processes, perhaps elsewhere.

    Raises:
        ValueError: names every environment that cannot be made, a prompt of it, and why: a name
            that nobody knows, a package, a sandbox, a corpus or a key that is missing, a row that
            lacks a column.
        ServerAwayError: likewise, of servers that do not answer and nothing else.
    """
    wrong, away = [], True
    for env_class, prompt in {prompt.env_class: prompt for prompt in reversed(prompts)}.items():
        try:
            if make:
                # In a thread: a loop may run in this one (Jupyter), and methods may be coroutines.
                with ThreadPoolExecutor(1, "jaxrl-readiness") as thread:
                    thread.submit(_try, prompt, env_config, max_turns).result()
            else:
                envs.load(env_class)
        except Exception as error:
            away = away and isinstance(error, RequestError)
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            reason = f"{reason}{columns_named(error, prompt.extras)}"
            wrong.append(redacted(f"environment '{env_class}' of {prompt.place}: {reason}"))
    if wrong:
        kind = ServerAwayError if away else ValueError
        raise kind("\n".join(["environments that cannot be made:", *wrong[::-1]]))


def _try(prompt: Prompt, env_config: Mapping[str, Any] | None, max_turns: int) -> None:
    with asyncio.Runner() as runner:
        extras = conversation_extras(prompt.extras, max_turns)
        env = envs.make(prompt.env_class, extras, env_config)
        try:
            if isinstance(env, envs.Env):
                _wait(runner, env.ready())
        finally:
            _wait(runner, env.close())


def _wait(runner: asyncio.Runner, result: Any) -> None:
    """Let a coroutine end; whatever else a method returned is none."""

    async def waited() -> None:
        await result

    if inspect.isawaitable(result):
        runner.run(waited())
