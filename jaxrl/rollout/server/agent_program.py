"""Agents that are programs of their own: started for each trajectory, in any language."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence

from jaxrl.rollout.server.agent_generator import session_url
from jaxrl.types import Prompt

_LAST_BYTES = 2000  # of what a program that fails has said


class AgentProgram:
    """Run a command for each trajectory; an `Agent` of `AgentGenerator`.

    The program finds the policy where OpenAI's clients look for it: in OPENAI_BASE_URL, which is
    that of its session, and OPENAI_API_KEY. It reads `{"messages": [...], "extras": {...}}` from
    its standard input, and posts `{"reward": number}` to the address in JAXRL_REWARD_URL before it
    ends.

    Args:
        command: program and arguments; no shell reads them.
        folder: that it runs in; None = the trainer's.
        environment: variables beside the trainer's own.
        token: of the endpoint, if it has one.

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
    ) -> None:
        self.command, self.folder, self.token = list(command), folder, token
        self.environment = dict(environment or {})

    async def __call__(self, base_url: str, session_id: str, prompt: Prompt) -> None:
        """Run the program to its end; it and what it has started are killed if that is cancelled.

        Raises:
            RuntimeError: it ended with another exit status than 0; has the end of its errors.
        """
        address = session_url(base_url, session_id)
        process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=self.folder,
            env={
                **os.environ,
                **self.environment,
                "OPENAI_BASE_URL": address,
                "OPENAI_API_KEY": self.token,
                "JAXRL_REWARD_URL": f"{address.removesuffix('/v1')}/reward",
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, which can be killed as a whole
        )
        told = json.dumps({"messages": prompt.messages, "extras": prompt.extras}).encode()
        try:
            _, errors = await process.communicate(told)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it runs any more
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            last = errors[-_LAST_BYTES:].decode(errors="replace")
            raise RuntimeError(f"{self.command} ended with status {process.returncode}: {last}")
