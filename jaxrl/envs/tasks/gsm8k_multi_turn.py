"""GSM8K in several turns, each of which ends with a tentative answer that is rewarded."""

from collections.abc import Mapping
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.tasks.gsm8k import strict_answer

_MAX_TURNS = 5
_FORMAT_SCORE = 0.2  # of a conversation in which every turn has an answer


class Gsm8kMultiTurnEnv(Env):
    """Give every turn 1 for the right number after "#### ", 0.2 / max_turns for another, else 0.

    The conversation ends with the right number, or after `max_turns` turns: a column of the row or
    of its `extra_info`, or else `generator.max_turns`.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "gsm8k_multi_turn")
        info = self.extras.get("extra_info") or {}
        default = info.get("max_turns", _MAX_TURNS)
        self.max_turns = int(self.extras.get("max_turns", default))
        self._correct = 0.0

    def step(self, action: str) -> StepOutput:
        """Compare the number in the response with the ground truth, and ask for another try."""
        self.turns += 1
        answer = strict_answer(action)
        self._correct = float(answer == self.ground_truth)
        reward = self._correct or (answer is not None) * _FORMAT_SCORE / self.max_turns
        done = bool(self._correct) or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": self._hint()}]
        metadata = {"answer": answer, "ground_truth": self.ground_truth}
        return StepOutput(observations=observations, reward=reward, done=done, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `avg_steps`: turns of the conversation; `correct`: 1 if the last was right."""
        return {"avg_steps": self.turns, "correct": self._correct}

    def _hint(self) -> str:
        if self.max_turns - self.turns > 1:
            return "Reason step by step, then give the number you think it is as '#### NUMBER'."
        return "This is the last turn: write only the final number, as '#### NUMBER'."
