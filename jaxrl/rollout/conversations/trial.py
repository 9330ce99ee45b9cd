"""Try each environment and reward function in one turn before a run: mistakes show at once."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl import activity, envs
from jaxrl.envs import StepOutput
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.conversations.session import EnvironmentFailure, Session, UnusableAnswer
from jaxrl.rollout.conversations.turns import TurnTemplate
from jaxrl.rollout.generator import run_now
from jaxrl.types import Prompt

# What code that looks for something in an answer raises where the answer is empty.
_OF_THE_ANSWER = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    TypeError,
    ValueError,
)


def try_environments(
    prompts: Sequence[Prompt],
    terms: RewardTerms,
    tokenizer: Any,
    *,
    env_config: Mapping[str, Any],
    max_turns: int,
    max_env_workers: int,
    timeout_seconds: float | None,
    chat_template_kwargs: Mapping[str, Any],
    use_conversation_multi_turn: bool = True,
) -> None:
    """Hold two conversations of one turn with the first prompt of each environment of the user's.

    The first answer is the shortest there is: the end-of-sequence token alone, whose text is "".
    The second repeats the beginning of the prompt, since many rewards look at short answers apart.
    The environment is made for each and closed after it; nothing of the conversations is kept. An
    environment of the library is asked where reward functions judge beside it. What an environment
    of the user's answers in vain is warned of.

    Args:
        prompts: of all data sets.
        terms: weights of rewards, and the user's functions.
        use_conversation_multi_turn: whether a turn is a message; else the model goes on in its own.
        max_env_workers, timeout_seconds: see `EnvironmentPool`.

    Raises:
        EnvironmentFailure: an environment or a reward function gave what cannot be used, raised
            what does not come of one answer, or failed at the same line for both; the rest is
            warned of.
        RewardTermError: reward terms and their weights do not belong together.
    """
    firsts = {prompt.env_class: prompt for prompt in reversed(prompts)}
    pool = EnvironmentPool(max_env_workers, timeout_seconds)
    template = TurnTemplate(tokenizer, chat_template_kwargs)

    async def converse() -> None:
        for prompt in firsts.values():
            ours = envs.is_ours(prompt.env_class)
            if ours and not terms.functions:
                continue
            steps, earlier = list[StepOutput](), None
            for answer in ("", str(prompt.messages[-1]["content"])[:8]):
                session = Session(prompt, pool, env_config, terms)
                try:
                    found = await _one_turn(session, template, max_turns, answer)
                except EnvironmentFailure as failure:
                    if failure.place or not ours:
                        raise
                    break
                if not isinstance(found, EnvironmentFailure):
                    steps.append(found)
                    continue
                if earlier and _same(found, earlier):
                    raise found
                what = f"the answer {answer!r}" if answer else "an empty answer"
                activity.warn(f"tried before the run with {what}: {found}")
                earlier = found
            if steps and not ours:
                _warn_of_what_is_in_vain(
                    prompt.env_class, steps[0], max_turns, in_messages=use_conversation_multi_turn
                )

    run_now(converse())


def _same(failure: EnvironmentFailure, earlier: EnvironmentFailure) -> bool:
    kinds = type(failure.__cause__), type(earlier.__cause__)
    return failure.place == earlier.place != "" and kinds[0] is kinds[1]


async def _one_turn(
    session: Session, template: TurnTemplate, max_turns: int, answer: str
) -> StepOutput | EnvironmentFailure:
    """Return what the turn brought, or how it failed if another answer might not fail so."""
    tokenizer, env_class = template.tokenizer, session.prompt.env_class
    try:
        await session.open(max_turns)
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        try:
            step = await session.step(answer, [tokenizer.decode([x]) for x in ids], stopped=True)
        except EnvironmentFailure as failure:
            cause = failure.__cause__
            if isinstance(cause, UnusableAnswer) or not isinstance(cause, _OF_THE_ANSWER):
                raise
            return failure
        if max_turns > 1 and not step["done"]:
            with session.blamed("with its observations"):
                template.between(step["observations"], ())
        metrics = await session.metrics()
        with session.blamed("in aggregate_metrics"):
            envs.load(env_class).aggregate_metrics([metrics])
        return step
    finally:
        await session.close()


def _warn_of_what_is_in_vain(
    env_class: str, step: StepOutput, max_turns: int, *, in_messages: bool
) -> None:
    """Warn of names and observations that nobody will read, and of a turn that answers nothing."""
    known = [*StepOutput.__annotations__]
    unread = [name for name in step if name not in known]
    if unread:
        near = [difflib.get_close_matches(str(name), known, n=1) for name in unread]
        hints = [f" (did you mean {found[0]!r}?)" if found else "" for found in near]
        names = ", ".join(f"{name!r}{hint}" for name, hint in zip(unread, hints, strict=True))
        activity.warn(
            f"environment '{env_class}': step gives {names}, which nobody reads; the keys are "
            f"{', '.join(known)}"
        )
    if step["done"]:
        return
    if max_turns == 1 and step["observations"]:
        activity.warn(
            f"environment '{env_class}' goes on after its first turn, but generator.max_turns=1: "
            "set generator.max_turns=4, or what it needs"
        )
    if max_turns > 1 and in_messages and not step["observations"]:
        activity.warn(
            f"environment '{env_class}' goes on after its first turn without observations: the "
            "model would speak twice in a row; give messages, or 'done': True"
        )
