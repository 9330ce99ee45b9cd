"""The procedural tasks of reasoning-gym: rows from any family, scored by the family's own rule.

A row carries its whole entry, so scoring needs neither the seed nor the version of the generator.
"""

import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from typing import Any

from jaxrl.envs.answers import is_algebra, is_literal, last_number, tagged_answer
from jaxrl.envs.protocol import Env, StepOutput
from jaxrl.envs.split import in_split

_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "answer_tag": tagged_answer,
    "last_number": last_number,
}

# Families whose score_answer calls eval or sympy.parse_expr on what the model wrote.
_GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": is_algebra,
    "intermediate_integration": is_algebra,
    "polynomial_multiplication": is_algebra,
    "puzzle24": is_algebra,
    "simple_integration": is_algebra,
}

# reasoning-gym draws item i of seed s from Random(s + i): neighbouring seeds give the same items.
_SEED_STRIDE = 1_000_000
_MAX_SEED = 4_000  # some families hand the seed to numpy, which wants it below 2**32
# A tenth of the items is in the split "eval", and some families cannot make every item; the surplus
# makes running short unlikely.
_DRAWS_PER_ROW = {None: 1, "train": 2, "eval": 30}
_EXTRA_DRAWS = 50


class ReasoningGymEnv(Env):
    """Scores one answer with the family's `score_answer`.

    The row's `reward_spec` may hold `extract`: "answer_tag" (the last `<answer>` tag, else the
    whole response; the default) or "last_number", which suits small models that answer
    "3 + 4 = 7.", and `partial_credit`: False rewards only full marks. Most families give part of
    the reward to a wrong answer that contains the right one ("14" for "4" scores 0.5).

    Args:
        env_config: unused.
        extras: of a row that `prompts` made: `entry`, `family_config`, `reward_spec`.
        family: name in reasoning-gym.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        family: str,
    ) -> None:
        super().__init__(env_config, extras)
        self.family = family
        if self.extras.get("entry") is None:
            raise ValueError(
                f"environment 'reasoning_gym:{family}' needs the column 'entry', which "
                "jaxrl.envs.reasoning_gym:prompts writes; the row's columns are "
                f"{sorted(self.extras)}"
            )
        self.entry = _decode(self.extras["entry"])
        reward_spec = self.extras.get("reward_spec") or {}
        self._extract = _find_extractor(reward_spec.get("extract") or "answer_tag")
        self._partial_credit = reward_spec.get("partial_credit", True)
        self._dataset = _scorer(family, self.extras.get("family_config") or "{}")
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Extracts the answer and scores it; an answer that the scorer chokes on earns 0."""
        self.turns += 1
        answer = self._extract(action) or ""
        score, error = self._score(answer)
        solved = float(score >= 1.0)
        self._metrics = {"solved": solved, "score": score, "unreadable": float(error is not None)}
        return StepOutput(
            observations=[],
            reward=score if self._partial_credit else solved,
            done=True,
            metadata={"answer": answer, "score": score, "error": error},
        )

    def _score(self, answer: str) -> tuple[float, str | None]:
        guard = _GUARDS.get(self.family)
        try:
            if guard is not None and not guard(answer):
                return 0.0, "the scorer would run this answer as code"
            return float(self._dataset.score_answer(answer, self.entry)), None
        except Exception as error:
            # Scorers parse free text and some raise on what they do not expect.
            return 0.0, repr(error)

    def get_metrics(self) -> dict[str, Any]:
        """`solved` (full marks), `score`, and `unreadable`: the scorer did not get through."""
        return self._metrics


def prompts(
    family: str,
    size: int,
    seed: int = 0,
    *,
    instruction: str | None = None,
    extract: str = "answer_tag",
    partial_credit: bool = True,
    split: str | None = None,
    **family_config: Any,
) -> Iterator[dict[str, Any]]:
    """Rows of one family; all values are strings, numbers and lists, so they fit into parquet.

    Args:
        family: name in reasoning-gym, for example "chain_sum".
        size: number of rows.
        seed: 0 to 4000; different seeds draw different items (of a small family they may be equal).
        instruction: a system message, for example how to write the answer.
        extract: how the answer is found in a response, see `ReasoningGymEnv`.
        partial_credit: False rewards only fully right answers.
        split: "train" or "eval" give questions that never meet; None takes all.
        **family_config: settings of the family, for example `min_terms=2`.

    Raises:
        ValueError: an unknown family or setting, or fewer than `size` questions in the split.
        ImportError: reasoning-gym is not installed.
    """
    _find_extractor(extract)
    num_draws = _count_draws(size, seed, split)
    dataset = _create(family, num_draws, seed * _SEED_STRIDE, family_config)
    entries = _draw(dataset, num_draws)
    chosen = (entry for entry in entries if in_split(entry["question"], split))
    reward_spec = {"extract": extract, "partial_credit": partial_credit}
    num_rows = 0
    for entry in islice(chosen, size):
        num_rows += 1
        yield _row(family, entry, instruction, reward_spec, family_config)
    if num_rows < size:
        raise ValueError(
            f"reasoning-gym family {family!r} gave only {num_rows} questions of split {split!r} "
            f"in {num_draws} draws, {size} were asked for; ask for fewer or widen the family"
        )


def _row(
    family: str,
    entry: dict[str, Any],
    instruction: str | None,
    reward_spec: dict[str, Any],
    family_config: dict[str, Any],
) -> dict[str, Any]:
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    # Some families have many right answers and name none.
    ground_truth = entry["answer"] or ""
    return {
        "prompt": [*system, {"role": "user", "content": entry["question"]}],
        "env_class": f"reasoning_gym:{family}",
        "data_source": family,
        "reward_spec": {"method": "reasoning_gym", "ground_truth": ground_truth, **reward_spec},
        "entry": _encode(entry, family),
        "family_config": _encode(family_config, family),
    }


def _count_draws(size: int, seed: int, split: str | None) -> int:
    if split not in _DRAWS_PER_ROW:
        raise ValueError(f"split must be 'train', 'eval' or None, got {split!r}")
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed must be 0 to {_MAX_SEED}, got {seed}")
    num_draws = size * _DRAWS_PER_ROW[split] + _EXTRA_DRAWS
    if size < 1 or num_draws > _SEED_STRIDE:
        most = (_SEED_STRIDE - _EXTRA_DRAWS) // _DRAWS_PER_ROW[split]
        raise ValueError(f"size must be 1 to {most} for split {split!r}, got {size}")
    return num_draws


def _draw(dataset: Any, num_draws: int) -> Iterator[dict[str, Any]]:
    for i in range(num_draws):
        try:
            entry = dataset[i]
        except Exception:
            # A few families give up on an item now and then, "maze" about once in 700.
            continue
        yield entry


def _find_extractor(name: str) -> Callable[[str], str | None]:
    if name not in _EXTRACTORS:
        raise ValueError(f"extract must be one of {', '.join(_EXTRACTORS)}, got {name!r}")
    return _EXTRACTORS[name]


@functools.cache
def _scorer(family: str, config_text: str) -> Any:
    return _create(family, size=1, seed=0, config=_decode(config_text))


def _create(family: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "the reasoning_gym environments need a package: pip install 'jaxrl[envs]'"
        ) from error
    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown reasoning-gym family {family!r}; {hint}the families are "
            f"{', '.join(sorted(DATASETS))}"
        )
    if family == "composite":
        raise ValueError(
            "the reasoning-gym family 'composite' is not supported; list its families as separate "
            "data sources instead"
        )
    try:
        return reasoning_gym.create_dataset(family, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"reasoning-gym family {family!r} refuses the settings {dict(config)}: {error}"
        ) from error


# ---- entries as text -----------------------------------------------------------------------------
# Families store tuples, fractions and dicts with integer keys, and compare against them; plain JSON
# loses all three.


def _encode(value: Any, family: str) -> str:
    try:
        return json.dumps(_tag(value))
    except TypeError as error:
        raise ValueError(
            f"an entry of reasoning-gym family {family!r} holds what JSON cannot: {error}"
        ) from error


def _tag(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_tag(item) for item in value]}
    if isinstance(value, Fraction):
        return {"__fraction__": str(value)}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _tag(item) for key, item in value.items()}
    return {"__items__": [[_tag(key), _tag(item)] for key, item in value.items()]}


def _decode(text: str | dict[str, Any]) -> Any:
    return json.loads(text, object_hook=_untag) if isinstance(text, str) else text


def _untag(tagged: dict[str, Any]) -> Any:
    if tagged.keys() == {"__tuple__"}:
        return tuple(tagged["__tuple__"])
    if tagged.keys() == {"__fraction__"}:
        return Fraction(tagged["__fraction__"])
    if tagged.keys() == {"__items__"}:
        return {key: value for key, value in tagged["__items__"]}
    return tagged
