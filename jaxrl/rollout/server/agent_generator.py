"""Rollouts by programs that talk to the HTTP endpoint, recovered token for token."""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.rollout.conversations.trajectories import to_columns
from jaxrl.rollout.conversations.turns import Transcript
from jaxrl.rollout.server.server import HttpServer
from jaxrl.rollout.server.sessions import Segment
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt, Trajectory

_log = logging.getLogger(__name__)
Agent = Callable[[str, str, Prompt], Awaitable[float]]


class AgentGenerator:
    """Run an agent of yours for each trajectory; a `GeneratorInterface`.

    The agent sends its session id as the header X-Session-ID. Sampling that it does not ask for is
    the trainer's, and so is the PRNG key: the same agent has the same tokens in every run. What the
    agent said is one row; if it changed what was said before, one row for each part, the last of
    which has the reward (`generator.step_wise_trajectories`).

    Args:
        server: the endpoint of the run, `BasePPOExp.server`.
        agent: `async def agent(base_url, session_id, prompt) -> reward`.
        max_agents: that run at a time.
        seconds: that an agent may take; None = any.
        step_wise: take trajectories of several parts.

    Example:
        async def agent(base_url, session_id, prompt):
            headers = {"X-Session-ID": session_id}
            async with AsyncOpenAI(base_url=base_url, api_key="-", default_headers=headers) as c:
                answer = await c.chat.completions.create(model="policy", messages=prompt.messages)
            return float(answer.choices[0].message.content == "1234")
    """

    def __init__(
        self,
        server: HttpServer,
        agent: Agent,
        *,
        max_agents: int = 64,
        seconds: float | None = 600.0,
        step_wise: bool = False,
    ) -> None:
        self.server, self.agent = server, agent
        self.max_agents, self.seconds, self.step_wise = max_agents, seconds, step_wise

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Return the trajectories of the batch, in order.

        An agent that fails ends its own trajectory: stop_reason "env_error", reward 0, all masked.

        Raises:
            RuntimeError: all of them failed.
        """
        places = asyncio.Semaphore(self.max_agents)

        async def one(prompt: Prompt, key: tuple[int, int]) -> list[Trajectory]:
            async with places:
                return await self._trajectory(prompt, key, batch["sampling"])

        pairs = zip(batch["prompts"], batch["keys"], strict=True)
        rows = await asyncio.gather(*(one(prompt, key) for prompt, key in pairs))
        if all(parts[-1].stop_reason == "env_error" for parts in rows):
            raise RuntimeError(f"all {len(rows)} agents of the batch failed; the log says why")
        flat, ids = [row for parts in rows for row in parts], batch.get("trajectory_ids")
        if ids is not None:
            ids = [i for i, parts in zip(ids, rows, strict=True) for _ in parts]
        output = to_columns(flat, ids)
        if self.step_wise:
            output["is_last_step"] = [row is parts[-1] for parts in rows for row in parts]
        return output

    async def _trajectory(
        self, prompt: Prompt, key: tuple[int, int], sampling: Any
    ) -> list[Trajectory]:
        name = f"rollout-{secrets.token_hex(12)}"
        self.server.open_session(name, sampling, key)
        failed, reward = True, 0.0
        try:
            call = self.agent(self.server.url, name, prompt)
            reward = float(await asyncio.wait_for(call, self.seconds))
            failed = not math.isfinite(reward)
        except Exception:
            _log.warning("the agent failed on prompt %s", prompt.uid, exc_info=True)
        segments = self.server.take_session(name).segments
        if not failed and (not segments or (len(segments) > 1 and not self.step_wise)):
            _log.warning(
                "prompt %s: the agent's session has %d parts, not one; an agent that changes what "
                "was said before needs generator.step_wise_trajectories",
                prompt.uid,
                len(segments),
            )
            failed = True
        if failed:
            segments, reward = segments[-1:] or [Segment(Transcript(list(prompt.tokens)))], 0.0
        rows = [_row(prompt, segment, failed=failed) for segment in segments]
        if not failed:
            transcript = segments[-1].transcript
            transcript.reward(reward)
            rows[-1].rewards = transcript.rewards
        return rows


def _row(prompt: Prompt, segment: Segment, *, failed: bool) -> Trajectory:
    transcript = segment.transcript
    if failed or segment.stop_reason == "abort":
        transcript.mask()
    return Trajectory(
        uid=prompt.uid,
        prompt_tokens=transcript.prompt,
        response_tokens=transcript.tokens,
        stop_reason="env_error" if failed else segment.stop_reason,
        policy_version=transcript.policy_version,
        env_class=prompt.env_class,
        turns=transcript.turns,
        routes=transcript.routes,
        **transcript.columns,
    )
