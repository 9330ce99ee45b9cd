"""GSM8K: a word problem, a number as the answer, one turn."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.answers import last_number
from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth

_STRICT = re.compile(r"#### (-?[0-9.,]+)")


def strict_answer(text: str) -> str | None:
    """Return the number after the first "#### ", without commas, or None; "72." keeps its dot."""
    match = _STRICT.search(text)
    return match[1].replace(",", "") if match else None


class Gsm8kEnv(Env):
    """Give reward 1 if the answer equals `reward_spec["ground_truth"]` as a string, 0 otherwise.

    `reward_spec["method"]` says where the answer stands: "rule" or "strict" (after the first
    "#### ", so that the format is learned too), or "flexible" (the last number of the response).
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "gsm8k")
        method = self.extras["reward_spec"].get("method") or "rule"
        extractors = {"rule": strict_answer, "strict": strict_answer, "flexible": last_number}
        if method not in extractors:
            raise ValueError(
                f"environment 'gsm8k': reward_spec['method'] must be one of "
                f"{', '.join(extractors)}, got {method!r}"
            )
        self._extract = extractors[method]
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Compare the number in the response with the ground truth."""
        self.turns += 1
        answer = self._extract(action)
        correct = float(answer == self.ground_truth)
        self._metrics = {"correct": correct, "answered": float(answer is not None)}
        metadata = {"answer": answer, "ground_truth": self.ground_truth}
        return StepOutput(observations=[], reward=correct, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, and `answered`: whether a number was found at all."""
        return self._metrics
