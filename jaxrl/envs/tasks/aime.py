"""AIME and DAPO's mathematics: the answer stands after "Answer:" and is compared as text.

The normalisation is Minerva's: Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix
D.1. The reward of +1 and -1 is DAPO's: Yu et al. 2025, https://arxiv.org/abs/2503.14476.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth

_END = 300  # characters of a response in which the answer stands
_ANSWER = re.compile(r"Answer\s*:\s*([^\n<]+)", re.IGNORECASE)
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}"),
    *("\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # only what is in the first formula
    *((re.compile(rf"\\{name}{{(.*?)}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed{(.*)}"), r"\1"),
    # Short forms: \frac12 is \frac{1}{2}, and \sqrt3 is \sqrt{3}.
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class AIMEEnv(Env):
    """Give reward 1 if the last "Answer: .." of the response's end is the ground truth, else -1.

    The ground truth is in `reward_spec`, or in `reward_model` as in DAPO's and verl's files.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        if "reward_spec" not in self.extras and "reward_model" in self.extras:
            self.extras = {**self.extras, "reward_spec": self.extras["reward_model"]}
        self.ground_truth = normalize(read_ground_truth(self.extras, "aime"))
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Compare the answer, normalised, with the ground truth."""
        self.turns += 1
        found = _ANSWER.findall(action[-_END:])
        answer = normalize(found[-1]) if found else None
        correct = answer == self.ground_truth
        self._metrics = {"acc": float(correct), "answered": float(answer is not None)}
        metadata = {"acc": correct, "pred": answer}
        return StepOutput(
            observations=[], reward=1.0 if correct else -1.0, done=True, metadata=metadata
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return `acc`: 1 if right, 0 if not; `answered`: whether there was an answer at all."""
        return self._metrics


def normalize(answer: str) -> str:
    """Return an answer without units, formatting and blanks."""
    answer = answer.rsplit("=", maxsplit=1)[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, inner in _UNWRAPPED:
        answer = pattern.sub(inner, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
