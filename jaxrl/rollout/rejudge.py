"""Judging a conversation a second time: a reward that comes out otherwise is not deterministic."""

import contextlib

from jaxrl.rollout.reward_terms import PLAIN, RewardTermError
from jaxrl.rollout.session import EnvironmentFailure, JudgedTurn, Session


def is_chosen(key: tuple[int, int], fraction: float) -> bool:
    """Whether this trajectory is judged again: a draw that its PRNG key names.

    Args:
        key: PRNG key data of the trajectory, two words of 32 bits.
        fraction: of all trajectories.
    """
    return key[0] < fraction * 2**32


async def find_difference(session: Session) -> str | None:
    """What a fresh environment and the reward functions say otherwise to the same turns.

    Args:
        session: finished; it recorded its turns.

    Returns:
        Which term, prompt and answer, and both rewards; None: they say the same.
    """
    again = Session(session.prompt, session.pool, session.env_config, session.terms, record=True)
    where = f"environment '{session.prompt.env_class}' on prompt {session.prompt.uid}"
    try:
        await again.open(session.max_turns)
        for turn in session.turns:
            step = await again.step(turn.text, turn.tokens, turn.stopped)
            if found := _different(turn, again.turns[-1]):
                return f"{where}, judged again: {found}"
            if step["done"]:
                break
    except (EnvironmentFailure, RewardTermError) as error:
        return f"{where} failed when it judged the same conversation again: {error}"
    finally:
        with contextlib.suppress(EnvironmentFailure):
            await again.close()
    return None


def _different(first: JudgedTurn, second: JudgedTurn) -> str | None:
    for name in {**first.terms, **second.terms}:
        was, now = first.terms.get(name), second.terms.get(name)
        if was != now:
            what = "reward" if name == PLAIN else f"reward term '{name}'"
            return f"the {what} of the answer {first.text!r} was {was}, and is now {now}"
    if first.done != second.done:
        ends = "ended" if first.done else "went on"
        return f"the conversation {ends} after the answer {first.text!r}, and does not now"
    return None
