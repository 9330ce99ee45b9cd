"""Rollouts by programs that talk to the HTTP endpoint, recovered token for token."""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl import activity
from jaxrl.registry import accepted_keywords
from jaxrl.rollout.conversations.trajectories import to_columns
from jaxrl.rollout.conversations.turns import Transcript
from jaxrl.rollout.server.server import HttpServer
from jaxrl.rollout.server.sessions import Segment, ServedSession
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt, Trajectory

_log = logging.getLogger(__name__)
Agent = Callable[..., Awaitable[float | None]]


def session_url(base_url: str, session_id: str) -> str:
    """Return the base URL of a session's requests, for programs that cannot send its header.

    It ends with "/v1", as `base_url` does; beside it is "../reward".
    """
    return f"{base_url.removesuffix('/v1')}/sessions/{session_id}/v1"


class AgentGenerator:
    """Run an agent of yours for each trajectory; a `GeneratorInterface`.

    The agent sends its session id as the header X-Session-ID, or asks at `session_url`. Sampling
    that it does not ask for is the trainer's, and so is the PRNG key: an agent that asks one thing
    after the other has the same tokens in every run. What the agent said is one row; if it changed
    what was said before, or went on from one place several times, a row for each branch, the last
    of which has the reward (`max_branches`). A token is sampled in one row alone: in the prompts of
    others it is read.

    Args:
        server: the endpoint of the run, `BasePPOExp.server`.
        agent: `async def agent(base_url, session_id, prompt) -> reward`; None = the reward is that
            which was posted to /sessions/ID/reward when it returns. One that posts it names a
            keyword `reward_secret`, and posts that with it: a program that knows the address alone
            is refused.
        max_agents: that run at a time.
        seconds: that an agent may take; None = any.
        max_branches: of a trajectory; one with more is masked. Several need
            generator.step_wise_trajectories, and a generator.max_turns of as many: a batch has
            room for so many rows of each trajectory.
        fixed_sampling: an agent that asks for another temperature, filter or seed than the
            trainer's is not refused, but answered with the trainer's.

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
        max_branches: int = 1,
        fixed_sampling: bool = False,
    ) -> None:
        self.server, self.agent = server, agent
        self.max_agents, self.seconds, self.max_branches = max_agents, seconds, max_branches
        self.fixed_sampling = fixed_sampling

    @property
    def longest_wait(self) -> float | None:
        """Return the seconds after which an agent is given up; None = never."""
        return self.seconds

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Return the trajectories of the batch, in order.

        An agent that fails ends its own trajectory: stop_reason "env_error", reward 0, all masked.

        Raises:
            RuntimeError: all of them failed.
        """
        places = asyncio.Semaphore(self.max_agents)

        async def one(
            prompt: Prompt, key: tuple[int, int]
        ) -> tuple[ServedSession, list[Trajectory]]:
            async with places:
                ended = await self._trajectory(prompt, key, batch["sampling"])
            rollouts.done += 1
            return ended

        with activity.doing("rollouts", len(batch["prompts"])) as rollouts:
            pairs = zip(batch["prompts"], batch["keys"], strict=True)
            ended = await asyncio.gather(*(one(prompt, key) for prompt, key in pairs))
        rows = [parts for _, parts in ended]
        if all(parts[-1].stop_reason == "env_error" for parts in rows):
            raise RuntimeError(f"all {len(rows)} agents of the batch failed; the log says why")
        flat, ids = [row for parts in rows for row in parts], batch.get("trajectory_ids")
        if ids is not None:
            ids = [i for i, parts in zip(ids, rows, strict=True) for _ in parts]
        output = to_columns(flat, ids)
        output["rollout_metrics"] |= branch_metrics([session for session, _ in ended])
        if self.max_branches > 1:
            output["is_last_step"] = [row is parts[-1] for parts in rows for row in parts]
        return output

    async def _trajectory(
        self, prompt: Prompt, key: tuple[int, int], sampling: Any
    ) -> tuple[ServedSession, list[Trajectory]]:
        name = f"rollout-{secrets.token_hex(12)}"
        secret = self.server.open_session(name, sampling, key, fixed=self.fixed_sampling)
        keywords = accepted_keywords(self.agent, {"reward_secret": secret})
        failed, reward = True, None
        try:
            call = self.agent(self.server.url, name, prompt, **keywords)
            reward = await asyncio.wait_for(call, self.seconds)
            failed = False
        except Exception:
            _log.warning("the agent failed on prompt %s", prompt.uid, exc_info=True)
        session = self.server.take_session(name)
        if not failed:
            reward = session.reward if reward is None else float(reward)
            failed = not self._can_be_used(prompt, session.segments, reward)
        segments = session.segments
        if failed:
            segments = segments[-1:] or [Segment(Transcript(list(prompt.tokens)))]
        rows = [_row(prompt, segment, failed=failed) for segment in segments]
        if not failed and reward is not None:
            transcript = segments[-1].transcript
            transcript.reward(reward)
            rows[-1].rewards = transcript.rewards
        return session, rows

    def _can_be_used(self, prompt: Prompt, segments: list[Segment], reward: float | None) -> bool:
        """Return whether an agent that ended can be learnt from; warn if not."""
        if reward is None or not math.isfinite(reward):
            why = (
                f"the agent's reward is {reward}: it must return a number, or one must be posted "
                "to /sessions/ID/reward before it returns"
            )
        elif not segments:
            why = "the agent asked for nothing under its X-Session-ID"
        elif len(segments) > self.max_branches:
            why = (
                f"the agent's session has {len(segments)} branches, more than {self.max_branches}; "
                "an agent that changes what was said before, or goes on from one place several "
                "times, needs AgentGenerator(max_branches=...), generator.step_wise_trajectories "
                "and a generator.max_turns of as many"
            )
        else:
            return True
        _log.warning("prompt %s: %s", prompt.uid, why)
        return False


def branch_metrics(sessions: Sequence[ServedSession]) -> dict[str, float]:
    """Return how much of what was sampled is not in the first branch of its session.

    `agent/branches` counts the samples that began another branch, over all sessions;
    `agent/unmatched_branches` those of them that no sampled token is a beginning of, so that all of
    their messages were tokenised. `agent/branch_token_share` is the share of sampled tokens.
    """
    segments = [segment for session in sessions for segment in session.segments]
    others = [segment for segment in segments if segment.number]
    sampled = sum(segment.sampled for segment in segments)
    return {
        "agent/branches": float(len(others)),
        "agent/unmatched_branches": float(sum(segment.parent is None for segment in others)),
        "agent/branch_token_share": sum(s.sampled for s in others) / max(sampled, 1),
    }


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
