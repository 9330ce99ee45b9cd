r"""Mathematics with answers that are compared as mathematics: \frac12 is 0.5."""

from collections.abc import Mapping
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.tasks import math_checker

_SECONDS = 10.0  # for one comparison; nearly all take milliseconds


class MathEnv(Env):
    r"""Gives reward 1 if math-verify finds the answer equal to the ground truth, 0 otherwise.

    The answer is what stands in the last `\boxed{..}` after `</think>`, or else the last formula or
    number. Where the truth is a number, a sum, a product or a power is none: `5!` is not paid for
    120. A comparison that takes longer than 10 s, or 2 GB, counts as wrong.

    Raises:
        ImportError: math-verify is not installed.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "math")
        math_checker.require()
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Compare the answer with the ground truth."""
        self.turns += 1
        conclusion = action.rpartition("</think>")[2]
        equal, answer = math_checker.is_equal(conclusion, self.ground_truth, _SECONDS)
        self._metrics = {"correct": float(equal), "answered": float(bool(answer))}
        metadata = {"answer": answer, "ground_truth": self.ground_truth}
        return StepOutput(observations=[], reward=float(equal), done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, and `answered`: whether an answer was found at all."""
        return self._metrics
