"""Conversations between engine and environments: token ids in, token ids out.

The engine's tokens and log-probs go into the trajectory as they are; text exists only for the
environment.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any

from jaxrl import activity
from jaxrl.config import GeneratorConfig, SamplingParams, keeps_pages
from jaxrl.data.messages import messages_of
from jaxrl.data.tokenizer import encode_prompt
from jaxrl.envs import StepOutput
from jaxrl.rollout.conversations.carried import CARRIED, Begun, goes_on, joined, next_piece
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.rejudge import is_chosen, judges_alike
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.conversations.session import EnvironmentFailure, Session, UnusableAnswer
from jaxrl.rollout.conversations.submissions import Submissions, Turn
from jaxrl.rollout.conversations.trajectories import refuse_all_failed, to_columns
from jaxrl.rollout.conversations.turns import (
    Transcript,
    TurnTemplate,
    spoken_tokens,
    tokens_of_prefix,
)
from jaxrl.rollout.native.stop_strings import completion_text
from jaxrl.rollout.protocol import Completion, Engine, Request, Sampling
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt, Trajectory, TrajectoryID

_log = logging.getLogger(__name__)
_NO_LOG_PROBS = (
    "the engine gives no log-probs of what it samples; set generator.sampling_params.logprobs to "
    "None: the trainer then uses its own"
)


def sample_key(*rng_path: object) -> tuple[int, int]:
    """Derive PRNG key data from whatever names a sample: seed, phase, step, prompt, number.

    A sample's tokens then depend on its name and the weights, not on what ran beside or before it,
    which is what makes a resumed run equal to an uninterrupted one.
    """
    digest = hashlib.blake2b("/".join(map(str, rng_path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def generator_input(
    prompts: Sequence[Prompt],
    samples: int,
    rng_path: Sequence[object],
    sampling: Sampling,
    *,
    demonstrations: bool = False,
) -> GeneratorInput:
    """Ask for `samples` trajectories of every prompt.

    The key of each is named by `rng_path`, prompt and number. Of prompts whose samples are under
    way only those are asked for that are not at their end.

    Args:
        rng_path: seed, phase and step.
        demonstrations: the last sample of a prompt is the answer that its row gives, if it does.
    """
    every = dict.fromkeys(range(samples))
    asked = [(p, i, so_far) for p in prompts for i, so_far in (p.begun or every).items()]
    batch = GeneratorInput(
        prompts=[p for p, _, _ in asked],
        trajectory_ids=[TrajectoryID(p.uid, i) for p, i, _ in asked],
        keys=[sample_key(*rng_path, p.uid, i) for p, i, _ in asked],
        sampling=sampling,
    )
    if any(p.begun for p in prompts):
        batch["begun"] = [so_far for _, _, so_far in asked]
    if demonstrations:
        last = samples - 1
        batch["demonstrations"] = [demonstration_of(p) if i == last else None for p, i, _ in asked]
    return batch


def demonstration_of(prompt: Prompt) -> str | None:
    """Return the answer that the row of a prompt gives as its completion; None if it has none.

    Raises:
        ValueError: that is no text and no single message.
    """
    found = prompt.extras.get("completion")
    if found is None:
        return None
    try:
        (message,) = messages_of(found, "completion", "assistant")
    except ValueError as error:
        raise ValueError(
            f"{prompt.place}: a completion that is trained on beside samples is one message of the "
            f"assistant or a text, not {found!r}"
        ) from error
    return message["content"]


def sampling_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> Sampling:
    """Return sampling parameters as the engine takes them, with the model's end-of-sequence ids."""
    return Sampling(
        max_tokens=params.max_generate_length,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        min_tokens=(params.additional_kwargs or {}).get("min_tokens", 0),
        stop_token_ids=(*eos_token_ids, *(params.stop_token_ids or ())),
        stop=tuple(params.stop or ()),
        keep_sampling_mask=params.keep_sampling_mask,
    )


class Failures:
    """Warn of the first few environments of a batch that fail, and of how many more did.

    They mostly fail alike, and a batch may hold thousands; how most of them did is said at the end.
    """

    shown = 3

    def __init__(self) -> None:
        self.count = 0
        self.kinds = Counter[str]()

    def warn(self, failure: EnvironmentFailure) -> None:
        """Count one more failure, and warn of it if it is among the first few."""
        self.count += 1
        cause = failure.__cause__
        where = f" ({failure.place})" if failure.place else ""
        self.kinds[f"{type(cause).__name__}{where}"] += 1
        if self.count <= self.shown:
            _log.warning("%s", failure)

    def warn_of_others(self) -> None:
        """Warn of how many more there were: there are no others to come."""
        if self.count > self.shown:
            ((kind, times),) = self.kinds.most_common(1)
            _log.warning(
                "... %d more environments of the batch failed; most often, %d of %d times, by %s",
                *(self.count - self.shown, times, self.count, kind),
            )


class Conversation:
    """Hold what is known of one conversation while it goes on."""

    def __init__(
        self,
        prompt: Prompt,
        key: tuple[int, int],
        session: Session,
        submissions: Submissions,
        failures: Failures,
        begun: Begun | None = None,
        demonstration: str | None = None,
    ) -> None:
        self.prompt, self.key, self.begun = prompt, key, begun
        self.demonstration = demonstration  # its answer; None = it is sampled
        self.session, self.submissions, self.failures = session, submissions, failures
        self.transcript = Transcript(list(prompt.tokens))
        self.over: Future[None] = Future()  # until it is cancelled the engine keeps its pages
        self.stop_reason, self.reward_is_number = "", False
        self.metrics: dict[str, Any] = {}
        self.failure: EnvironmentFailure | None = None
        self.rejudged: bool | None = None  # whether that gave the same
        self.steps = 0  # of the engine, see `Completion`
        self.too_long = 0  # tokens of the input that ended it, being more than a turn may have

    def take(self, completion: Completion) -> None:
        """Add a turn of the policy; one that was aborted before its first token is none."""
        self.stop_reason = completion.stop_reason
        self.steps += completion.steps
        if not completion.tokens:
            return
        self.transcript.add_sampled(
            completion.tokens,
            log_probs=completion.log_probs,
            sampling_mask_ids=completion.sampling_mask_ids,
            versions=completion.versions,
            context_versions=completion.context_versions,
            routes=completion.routes,
        )

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let a failure of the environment in the block end the conversation, and nothing else."""
        try:
            yield
        except EnvironmentFailure as failure:
            self.failures.warn(failure)
            self.failure, self.stop_reason = failure, "env_error"
            self.transcript.mask()

    async def close(self) -> None:
        """Let the engine's pages and the environment go; what was judged stays judged."""
        self.over.cancel()
        try:
            await self.session.close()
        except EnvironmentFailure as failure:
            self.failures.warn(failure)

    def trajectory(self) -> Trajectory:
        """Return the finished conversation as a trajectory."""
        transcript = self.transcript
        plain = self.reward_is_number and len(transcript.turns) == 1 and all(transcript.loss_mask)
        columns = transcript.columns
        if plain:
            columns["rewards"] = transcript.rewards[-1]
        return Trajectory(
            uid=self.prompt.uid,
            prompt_tokens=transcript.prompt,
            response_tokens=transcript.tokens,
            stop_reason=self.stop_reason,
            policy_version=transcript.policy_version,
            env_class=self.prompt.env_class,
            env_metrics=self.metrics,
            reward_terms={} if self.failure else self.session.earned,
            feedback=self.session.feedback,
            demonstrated=self.demonstration is not None,
            env_seconds=self.session.seconds,
            failure=str(self.failure) if self.failure else "",
            rejudged=self.rejudged,
            turns=transcript.turns,
            routes=transcript.routes,
            steps=self.steps,
            **columns,
        )


class ConversationGenerator:
    """Hold conversations: the engine speaks, the environment judges and answers.

    A `GeneratorInterface`. One coroutine per trajectory; the first turns of a batch are one call of
    the engine, in which the samples of a prompt share a request, later turns are requests of their
    own.

    Args:
        engine: samples token ids.
        tokenizer: turns them into the text that environments read.
        settings: turns, lengths, what stands between turns.
        env_config: handed to every environment.
        max_env_workers: calls of environments at a time; 0 = inline.
        env_timeout_seconds: of each call of an environment; None = none.
        reward_terms: weights of named rewards, and functions that judge beside the environment.
        pool: where environments live, in place of the threads that the two before it describe.
        rejudge_fraction: of the trajectories; these are judged a second time.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: GeneratorConfig | None = None,
        *,
        env_config: Mapping[str, Any] | None = None,
        max_env_workers: int = 32,
        env_timeout_seconds: float | None = None,
        reward_terms: RewardTerms | None = None,
        pool: EnvironmentPool | None = None,
        rejudge_fraction: float = 0.0,
    ) -> None:
        self.engine, self.tokenizer, self.env_config = engine, tokenizer, env_config
        # text of a token: the same few are asked for over and over
        self._piece = functools.cache(lambda token: tokenizer.decode([token]))
        self.settings = GeneratorConfig() if settings is None else settings
        self.log_probs = self.settings.sampling_params.logprobs is not None
        self.pool = pool or EnvironmentPool(max_env_workers, env_timeout_seconds)
        self._submissions: Submissions | None = None
        self.reward_terms, self.rejudge_fraction = reward_terms, rejudge_fraction
        self.template = TurnTemplate(tokenizer, self.settings.chat_template_kwargs)
        self._told_of_long_inputs = False

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Return the trajectories of the batch, in order.

        What goes wrong in an environment ends its own conversation: stop_reason "env_error",
        reward 0, everything masked. So does an answer of the engine that is no sample.

        Raises:
            AllFailed: that is what became of every trajectory of a whole batch; gives the first
                one's reason.
            RewardTermError: reward terms and their weights do not belong together.
        """
        submissions, failures = self._submissions_here(), Failures()
        sampling: Sampling = batch["sampling"]
        with activity.doing("rollouts", len(batch["prompts"])) as rollouts:
            nothing = [None] * len(batch["prompts"])
            columns = (
                batch["prompts"],
                batch["keys"],
                batch.get("begun") or nothing,
                batch.get("demonstrations") or nothing,
            )
            conversations = [
                Conversation(
                    prompt, key, self._session(prompt, key), submissions, failures, so_far, given
                )
                for prompt, key, so_far, given in zip(*columns, strict=True)
            ]
            try:
                await _all([self._open(conversation) for conversation in conversations])
                turns = await self._first_turns(conversations, submissions, sampling)
                pairs = zip(conversations, turns, strict=True)
                await _all([self._hold(one, turn, sampling, rollouts) for one, turn in pairs])
            finally:
                for conversation in conversations:  # first: whatever waits may be interrupted
                    conversation.over.cancel()
                await submissions.close()
                await _all([c.close() for c in conversations if c.session.is_open])
                failures.warn_of_others()
        part, ids = batch.get("part", False), batch.get("trajectory_ids")
        self._tell_of_long_inputs(conversations)
        trajectories = [conversation.trajectory() for conversation in conversations]
        if not part:
            refuse_all_failed([conversation.failure for conversation in conversations])
        return to_columns(
            trajectories,
            ids,
            step_wise=self.settings.step_wise_trajectories,
            log_probs=self.log_probs,
            part=part,
        )

    def _submissions_here(self) -> Submissions:
        """Return the submissions of this loop.

        Batches that are sampled side by side share calls of the engine.
        """
        found, loop = self._submissions, asyncio.get_running_loop()
        if found is None or found.loop is not loop:
            found = self._submissions = Submissions(self.engine, loop)
        return found

    def _session(self, prompt: Prompt, key: tuple[int, int]) -> Session:
        record = is_chosen(key, self.rejudge_fraction)
        return Session(prompt, self.pool, self.env_config, self.reward_terms, record=record)

    async def _open(self, conversation: Conversation) -> None:
        """Let the environment open the conversation, perhaps in words of its own."""
        with conversation.failing():
            messages = await conversation.session.open(self.settings.max_turns)
            if messages != conversation.prompt.messages:
                variables = self.settings.chat_template_kwargs
                with conversation.session.blamed("at the start"):
                    opening = encode_prompt(self.tokenizer, messages, **variables)
                conversation.transcript.prompt = opening
            drawn_from = conversation.begun.prompt_tokens if conversation.begun else ()
            if drawn_from and list(drawn_from) != list(conversation.transcript.prompt):
                with conversation.session.blamed("at the start"):
                    raise UnusableAnswer(
                        "init opens a conversation that goes on (generator.partial_rollouts) in "
                        "other words than before: let it follow from the row alone"
                    )

    async def _first_turns(
        self, conversations: Sequence[Conversation], submissions: Submissions, sampling: Sampling
    ) -> list[Turn | None]:
        """Submit all first turns in one call of the engine; None where nothing is to be sampled.

        Turns that are demonstrations are there already.
        """
        turns: list[Turn | None] = [None] * len(conversations)
        able = []
        for i, one in enumerate(conversations):
            if one.failure or not self._fits(one):
                continue
            if one.demonstration is None:
                able.append(i)
            else:
                turns[i] = self._demonstrated(one.demonstration, sampling)

        def begins(i: int) -> tuple[str, tuple[int, ...], int]:
            one = conversations[i]
            drawn = one.begun.tokens if one.begun else []
            return one.prompt.uid, (*one.transcript.input, *drawn), len(drawn)

        groups = [(tokens, drawn, list(rows)) for (_, tokens, drawn), rows in groupby(able, begins)]
        if self.settings.longest_first:  # what goes on is long already
            groups.sort(key=lambda g: (-g[1], -conversations[g[2][0]].prompt.earlier.longest))
        requests = []
        most = self.settings.partial_rollouts.max_tokens_per_step
        for tokens, _, rows in groups:
            alike = [conversations[i] for i in rows]
            piece = next_piece(sampling, alike[0].begun, most)
            requests.append(self._request(alike, [c.key for c in alike], tokens, piece))
        submitted = await asyncio.gather(*(submissions.submit(request) for request in requests))
        for (*_, rows), samples in zip(groups, submitted, strict=True):
            for i, turn in zip(rows, samples, strict=True):
                turns[i] = turn
        return turns

    def _demonstrated(self, text: str, sampling: Sampling) -> Turn:
        """Return an answer of the data as one that was sampled; cut where sampling would end it."""
        tokens = [*self.template.encode(text), self.tokenizer.eos_token_id]
        reason = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens, turn = tokens[: sampling.max_tokens], Turn()
        turn.set_result(Completion(tokens, [0.0] * len(tokens), reason, versions=[]))
        return turn

    def _request(
        self,
        conversations: Sequence[Conversation],
        keys: Sequence[tuple[int, int]],
        tokens: tuple[int, ...],
        sampling: Sampling,
    ) -> Request:
        """Build the request to continue the same input in some conversations."""
        over = tuple(c.over for c in conversations) if keeps_pages(self.settings) else ()
        earlier = conversations[0].prompt.earlier
        return Request(
            tokens,
            tuple(keys),
            sampling,
            conversations=over,
            references=earlier.answers,
            guesses=earlier.guesses,
        )

    async def _hold(
        self,
        conversation: Conversation,
        turn: Turn | None,
        sampling: Sampling,
        rollouts: activity.Activity,
    ) -> None:
        """Hold a conversation from its first turn to its end."""
        carried = False
        with conversation.failing():
            while turn is not None:
                completion = await asyncio.wrap_future(turn)
                _refuse_flawed(conversation.prompt, completion)
                if conversation.begun:
                    most = self.settings.partial_rollouts.max_tokens_per_step
                    carried = goes_on(conversation.begun, completion, sampling, most)
                    completion = joined(conversation.begun, completion)
                    if carried:
                        conversation.take(completion)
                        conversation.stop_reason = CARRIED
                        break
                rollouts.waiting += 1
                try:
                    turn = await self._turn(conversation, completion, sampling)
                finally:
                    rollouts.waiting -= 1
            if not conversation.failure and not carried:
                conversation.metrics = await conversation.session.metrics()
        conversation.transcript.end_at_turn()
        await conversation.close()
        if conversation.session.turns and not conversation.failure:
            conversation.rejudged = await judges_alike(conversation.session)
        rollouts.done += 1

    async def _turn(
        self, conversation: Conversation, completion: Completion, sampling: Sampling
    ) -> Turn | None:
        """Take what was said to the environment; return the next turn, if there is one."""
        transcript = conversation.transcript
        if self.log_probs and completion.tokens and not completion.log_probs:
            raise ValueError(_NO_LOG_PROBS)
        conversation.take(completion)
        if len(transcript.turns) == self.settings.max_turns:  # its pages are needed no more
            conversation.over.cancel()
        if completion.stop_reason == "abort":
            transcript.mask()
            return None
        step, standing = await self._step(conversation.session, completion, sampling)
        goes_on = not step["done"] and len(transcript.turns) < self.settings.max_turns
        if goes_on and standing > 1 and not self.settings.use_conversation_multi_turn:
            last = completion.tokens[standing - 1]
            standing -= last in sampling.stop_token_ids  # one message: no end
        transcript.keep(standing)
        earned = step["reward"]
        assert not isinstance(earned, Mapping)  # the session has weighed the terms
        transcript.reward(earned)
        conversation.reward_is_number = not isinstance(earned, list)
        closed = self._end_turn(transcript, completion, sampling, goes_on=goes_on)
        if not goes_on:
            return None
        with conversation.session.blamed("with its observations"):
            transcript.add_given(self._answer(step, sampling, closed=closed))
        if not self._fits(conversation):
            return None
        key = sample_key(*conversation.key, len(transcript.turns))
        request = self._request([conversation], [key], transcript.input, sampling)
        (turn,) = await conversation.submissions.submit(request)
        return turn

    async def _step(
        self, session: Session, completion: Completion, sampling: Sampling
    ) -> tuple[StepOutput, int]:
        """Return the environment's judgement, and how many of the tokens it lets stand."""
        tokens, spoken = completion.tokens, spoken_tokens(completion)
        ended = len(spoken) < len(tokens)
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        text = completion_text(decode, completion, sampling.stop, keep_stop=True)
        pieces = [self._piece(token) for token in tokens]
        step = await session.step(text, pieces, ended)
        action = step.get("postprocessed_action")
        if action is None or action == text:
            return step, len(tokens)
        with session.blamed(f"with the answer {text!r}"):
            return step, tokens_of_prefix(self.tokenizer, spoken, action)

    def _end_turn(
        self, transcript: Transcript, completion: Completion, sampling: Sampling, *, goes_on: bool
    ) -> bool:
        """Append the end-of-sequence token where it is wanted.

        Returns whether the turn needs no end.
        """
        if transcript.tokens[-1] in sampling.stop_token_ids:
            return True
        start, end = transcript.turns[-1]
        by_string = completion.stop_string is not None and end - start == len(completion.tokens)
        if self.settings.use_conversation_multi_turn:
            wanted = by_string and self.settings.append_eos_token_after_stop_str_in_multi_turn
        else:
            wanted = completion.stop_reason == "stop" and not goes_on
        if wanted:
            transcript.extend_turn(self.tokenizer.eos_token_id)
        return by_string

    def _answer(self, step: StepOutput, sampling: Sampling, *, closed: bool) -> list[int]:
        """Return the tokens between two turns."""
        if not self.settings.use_conversation_multi_turn:
            return self.template.encode("".join(m["content"] for m in step["observations"]))
        end, rest = self.template.between(step["observations"], sampling.stop_token_ids)
        return rest if closed else end + rest

    def _fits(self, conversation: Conversation) -> bool:
        """Return whether the input of the next turn is short enough; if not, there is none."""
        longest = self.settings.max_input_length
        if longest is None or len(conversation.transcript.input) <= longest:
            return True
        conversation.stop_reason = "length"
        conversation.too_long = len(conversation.transcript.input)
        return False

    def _tell_of_long_inputs(self, conversations: Sequence[Conversation]) -> None:
        """Warn once where most conversations of a batch end as their next input is too long."""
        lengths = [c.too_long for c in conversations if c.too_long]
        if self._told_of_long_inputs or 2 * len(lengths) <= len(conversations):
            return
        self._told_of_long_inputs = True
        _log.warning(
            "%d of %d conversations ended because the input of their next turn was longer than "
            "generator.max_input_length=%s: %d tokens in the middle, %d at most. Raise it, or let "
            "the environment say less",
            len(lengths),
            len(conversations),
            self.settings.max_input_length,
            sorted(lengths)[len(lengths) // 2],
            max(lengths),
        )


def _refuse_flawed(prompt: Prompt, completion: Completion) -> None:
    """Refuse what an engine of the user's gave for a sample and is none.

    Raises:
        EnvironmentFailure: it costs the sample's own conversation.
    """
    if flaw := completion.flaw:
        error = UnusableAnswer(
            f"the engine answered {prompt.place} with {flaw} (stop_reason="
            f"{completion.stop_reason!r}); a Completion has at least one token, if it was not "
            "aborted, and one entry for each in every list that is not empty"
        )
        raise EnvironmentFailure(str(error)) from error


async def _all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await coroutines side by side; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
