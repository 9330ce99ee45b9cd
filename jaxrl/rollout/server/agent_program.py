"""Agents that are programs of their own: started for each trajectory, in any language."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.child_environment import child_environment
from jaxrl.rollout.server.agent_generator import session_url
from jaxrl.types import Prompt

_LAST_BYTES = 2000  # of what a program that fails has said


class AgentProgram:
    """Run a command for each trajectory; an `Agent` of `AgentGenerator`.

    The program finds the policy where OpenAI's clients look for it: in OPENAI_BASE_URL, which is
    that of its session, and OPENAI_API_KEY. It reads
    `{"messages": [...], "extras": {...}, "reward_secret": "..."}` from its standard input, and
    posts `{"reward": number, "secret": "..."}` to the address in JAXRL_REWARD_URL before it ends.
    A command of the model that it runs knows the address, and not the secret.

    Args:
        command: program and arguments; no shell reads them.
        folder: that it runs in; None = the trainer's.
        environment: variables beside those of `child_environment`. The model can read them where
            the program runs what it says.
        token: of the endpoint, if it has one.
        user: of this machine that the program runs as, which only root may choose; None = the
            trainer's, whose processes may read each other's environment in /proc.

    Example:
        AgentGenerator(run.server, AgentProgram(["node", "agent.js"]))
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        token: str = "-",
        user: str | None = None,
    ) -> None:
        self.command, self.folder, self.token = list(command), folder, token
        self.environment = dict(environment or {})
        self._identity: dict[str, Any] = {}
        if user is not None:
            import pwd  # not of Windows

            found = pwd.getpwnam(user)
            self._identity = {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}

    async def __call__(
        self, base_url: str, session_id: str, prompt: Prompt, *, reward_secret: str = ""
    ) -> None:
        """Run the program to its end; it and what it has started are killed if that is cancelled.

        Raises:
            RuntimeError: it ended with another exit status than 0; has the end of its errors.
        """
        address = session_url(base_url, session_id)
        process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=self.folder,
            env={
                **child_environment(),
                **self.environment,
                "OPENAI_BASE_URL": address,
                "OPENAI_API_KEY": self.token,
                "JAXRL_REWARD_URL": f"{address.removesuffix('/v1')}/reward",
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, which can be killed as a whole
            **self._identity,
        )
        told = {
            "messages": prompt.messages,
            "extras": prompt.extras,
            "reward_secret": reward_secret,
        }
        try:
            _, errors = await process.communicate(json.dumps(told).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it runs any more
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            last = errors[-_LAST_BYTES:].decode(errors="replace")
            raise RuntimeError(f"{self.command} ended with status {process.returncode}: {last}")
