"""Judging a conversation a second time: a reward that comes out otherwise is not deterministic."""

import contextlib
import logging

from jaxrl.rollout.conversations.reward_terms import PLAIN, RewardTermError
from jaxrl.rollout.conversations.session import EnvironmentFailure, JudgedTurn, Session

_log = logging.getLogger(__name__)
_SHOWN = 300  # characters of an answer in a message


def is_chosen(key: tuple[int, int], fraction: float) -> bool:
    """Return whether a trajectory is judged again: a draw that its PRNG key names.

    Args:
        key: PRNG key data of the trajectory, two words of 32 bits.
        fraction: of all trajectories.
    """
    return key[0] < fraction * 2**32


async def judges_alike(session: Session) -> bool | None:
    """Return whether a fresh environment and the reward functions judge the same turns alike.

    The log has which term, prompt and answer they do not, and both rewards.

    Args:
        session: finished; it recorded its turns. It gets the seconds of the second judgement too.

    Returns:
        None: the second judgement did not come to its end, as where a server was out of order.
    """
    again = Session(session.prompt, session.pool, session.env_config, session.terms, record=True)
    try:
        difference = await _difference(session, again)
    except EnvironmentFailure as error:
        _log.warning("not judged a second time: %s", error)
        return None
    finally:
        with contextlib.suppress(EnvironmentFailure):
            await again.close()
        session.seconds += again.seconds
    if difference:
        _log.warning("%s", difference)
    return difference is None


async def _difference(session: Session, again: Session) -> str | None:
    where = f"environment '{session.prompt.env_class}' on prompt {session.prompt.uid}"
    try:
        await again.open(session.max_turns)
        for turn in session.turns:
            step = await again.step(turn.text, turn.tokens, turn.stopped)
            if found := _different(turn, again.turns[-1]):
                return f"{where}, judged again: {found}"
            if step["done"]:
                break
    except RewardTermError as error:
        return f"{where} gave other terms when it judged the same conversation again: {error}"
    return None


def _different(first: JudgedTurn, second: JudgedTurn) -> str | None:
    answer = f"{first.text!r:.{_SHOWN}}"
    for name in {**first.terms, **second.terms}:
        was, now = first.terms.get(name), second.terms.get(name)
        if was != now:
            what = "reward" if name == PLAIN else f"reward term '{name}'"
            return f"the {what} of the answer {answer} was {was}, and is now {now}"
    if first.done != second.done:
        ends = "ended" if first.done else "went on"
        return f"the conversation {ends} after the answer {answer}, and does not now"
    return None
