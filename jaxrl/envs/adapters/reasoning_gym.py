"""The procedural tasks of reasoning-gym: rows from any family, scored by the family's own rule.

A row carries its whole entry, so scoring needs neither the seed nor the version of the generator.
"""

import dataclasses
import difflib
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxrl.envs.adapters.adapter import Adapter, import_library
from jaxrl.envs.adapters.tagged_json import decode, encode
from jaxrl.envs.answers import is_algebra, is_literal, last_number, tagged_answer
from jaxrl.envs.protocol import StepOutput
from jaxrl.envs.toys.split import in_split

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


class ReasoningGymEnv(Adapter):
    """Scores one answer with the family's `score_answer`.

    The row's `reward_spec` may hold `extract`: "answer_tag" (the last `<answer>` tag, else the
    whole response; the default) or "last_number", which suits small models that answer
    "3 + 4 = 7.", and `partial_credit`: False rewards only full marks. Most families give part of
    the reward to a wrong answer that contains the right one ("14" for "4" scores 0.5).

    Args:
        env_config: unused.
        extras: of a row that `prompts` or `curriculum` made: `entry`, `family_config`,
            `reward_spec`, perhaps `level`.
        name: of the family.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras, name=name)
        if self.extras.get("entry") is None:
            raise ValueError(
                f"environment 'reasoning_gym:{name}' needs the column 'entry', which "
                "jaxrl.envs.adapters.reasoning_gym:prompts writes; the row's columns are "
                f"{sorted(self.extras)}"
            )
        self.entry = decode(self.extras["entry"])
        reward_spec = self.extras.get("reward_spec") or {}
        self._extract = _find_extractor(reward_spec.get("extract") or "answer_tag")
        self._partial_credit = reward_spec.get("partial_credit", True)
        self._dataset = _scorer(name, self.extras.get("family_config") or "{}")
        level = self.extras.get("level")
        self._metrics: dict[str, Any] = {} if level is None else {"level": float(level)}

    @classmethod
    def of(cls, name: str) -> type[Adapter]:
        """Return the class, if there is such a family of single questions."""
        _check_family(name)
        if name == "composite":
            raise ValueError(
                "the rows of the reasoning-gym family 'composite' have the env_class of the "
                "family that each was drawn from, as jaxrl.envs.adapters.reasoning_gym:prompts "
                "writes them"
            )
        return cls

    def step(self, action: str) -> StepOutput:
        """Extract the answer and score it; an answer that the scorer chokes on earns 0."""
        self.turns += 1
        answer = self._extract(action) or ""
        score, error = self._score(answer)
        solved = float(score >= 1.0)
        self._metrics |= {"solved": solved, "score": score, "unreadable": float(error is not None)}
        return StepOutput(
            observations=[],
            reward=score if self._partial_credit else solved,
            done=True,
            metadata={"answer": answer, "score": score, "error": error},
        )

    def _score(self, answer: str) -> tuple[float, str | None]:
        guard = _GUARDS.get(self.name)
        try:
            if guard is not None and not guard(answer):
                return 0.0, "the scorer would run this answer as code"
            return float(self._dataset.score_answer(answer, self.entry)), None
        except Exception as error:
            # Scorers parse free text and some raise on what they do not expect.
            return 0.0, repr(error)

    def get_metrics(self) -> dict[str, Any]:
        """Return `solved` (full marks), `score`, `unreadable` and `level`.

        `unreadable` says that the scorer did not get through.
        """
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
    """Yield rows of one family; all values are strings, numbers and lists, and fit into parquet.

    Args:
        family: name in reasoning-gym, for example "chain_sum". "composite" mixes families:
            `datasets=[{"name": "chain_sum", "weight": 2.0, "config": {"min_terms": 2}}, ..]`.
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
    how = _How(instruction, extract, partial_credit, split)
    yield from _rows(family, family_config, how, size, _first_seed(seed, [size], split))


def curriculum(
    family: str,
    size: int,
    levels: Sequence[int | Mapping[str, int]],
    seed: int = 0,
    *,
    mode: str = "inclusive",
    instruction: str | None = None,
    extract: str = "answer_tag",
    partial_credit: bool = True,
    split: str | None = None,
    **family_config: Any,
) -> Iterator[dict[str, Any]]:
    """Yield rows of one family that become harder by its own curriculum; see `prompts`.

    Trained on in this order (`data.shuffle=False`, `trainer.epochs=1`) they are a schedule over the
    steps, and a resumed run is where it was. The column `level` is the row's place in `levels`.

    Args:
        family: name in reasoning-gym; all but a few have a curriculum.
        size: number of rows; each level has an equal part, the first ones one more if need be.
        levels: in this order. A number is the level of all attributes of the curriculum (an
            attribute that has fewer stays at its highest); {"*": 1, "num_digits": 3} sets some.
        mode: reasoning-gym's, of attributes that are a range: "inclusive" goes from the lowest
            level to this one, "upper_bound" is this level alone.
        **family_config: settings of the family that the curriculum does not set.

    Raises:
        ValueError: as `prompts`; or the family has no curriculum, or not this level or attribute.
    """
    if not 0 < len(levels) <= size:
        raise ValueError(f"levels must be 1 to size={size} levels, got {list(levels)!r}")
    how = _How(instruction, extract, partial_credit, split)
    parts = [size // len(levels) + (i < size % len(levels)) for i in range(len(levels))]
    first = _first_seed(seed, parts, split)
    for number, (level, part) in enumerate(zip(levels, parts, strict=True)):
        config = _config_at(family, level, mode, family_config)
        for row in _rows(family, config, how, part, first):
            yield {**row, "level": number}
        first += _count_draws(part, split)


class _How(NamedTuple):
    """Hold what the rows of a data set have in common."""

    instruction: str | None
    extract: str
    partial_credit: bool
    split: str | None


def _rows(
    family: str, config: Mapping[str, Any], how: _How, size: int, first_seed: int
) -> Iterator[dict[str, Any]]:
    _find_extractor(how.extract)
    num_draws = _count_draws(size, how.split)
    entries = _draw(_create(family, num_draws, first_seed, config), num_draws)
    chosen = (entry for entry in entries if in_split(entry["question"], how.split))
    num_rows = 0
    for entry in islice(chosen, size):
        num_rows += 1
        yield _row(entry, *_source(family, config, entry), how)
    if num_rows < size:
        raise ValueError(
            f"reasoning-gym family {family!r} gave only {num_rows} questions of split "
            f"{how.split!r} in {num_draws} draws, {size} were asked for; ask for fewer or widen "
            "the family"
        )


def _source(
    family: str, config: Mapping[str, Any], entry: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Return the family that an entry comes from, and its settings."""
    if family != "composite":
        return family, config
    source = entry["metadata"]["source_dataset"]
    return source, next(
        spec.get("config", {}) for spec in config["datasets"] if spec["name"] == source
    )


def _row(
    entry: dict[str, Any], family: str, family_config: Mapping[str, Any], how: _How
) -> dict[str, Any]:
    system = [] if how.instruction is None else [{"role": "system", "content": how.instruction}]
    # Some families have many right answers and name none.
    ground_truth = entry["answer"] or ""
    scoring = {"extract": how.extract, "partial_credit": how.partial_credit}
    return {
        "prompt": [*system, {"role": "user", "content": entry["question"]}],
        "env_class": f"reasoning_gym:{family}",
        "data_source": family,
        "reward_spec": {"method": "reasoning_gym", "ground_truth": ground_truth, **scoring},
        "entry": _text(entry, family),
        "family_config": _text(dict(family_config), family),
    }


def _text(value: Any, family: str) -> str:
    try:
        return encode(value)
    except TypeError as error:
        raise ValueError(
            f"an entry of reasoning-gym family {family!r} holds what JSON cannot: {error}"
        ) from error


def _first_seed(seed: int, parts: Sequence[int], split: str | None) -> int:
    """Return the seed of the first item of a data set whose parts have these sizes."""
    if split not in _DRAWS_PER_ROW:
        raise ValueError(f"split must be 'train', 'eval' or None, got {split!r}")
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed must be 0 to {_MAX_SEED}, got {seed}")
    size = sum(parts)
    if size < 1 or sum(_count_draws(part, split) for part in parts) > _SEED_STRIDE:
        most = (_SEED_STRIDE - _EXTRA_DRAWS * len(parts)) // _DRAWS_PER_ROW[split]
        raise ValueError(f"size must be 1 to {most} for split {split!r}, got {size}")
    return seed * _SEED_STRIDE


def _count_draws(size: int, split: str | None) -> int:
    return size * _DRAWS_PER_ROW[split] + _EXTRA_DRAWS


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
    return _create(family, size=1, seed=0, config=decode(config_text))


def _check_family(family: str) -> None:
    families = _library("factory").DATASETS
    if family not in families:
        near = difflib.get_close_matches(family, families, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown reasoning-gym family {family!r}; {hint}the families are "
            f"{', '.join(sorted(families))}"
        )


def _create(family: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    _check_family(family)
    try:
        settings = _with_enums(family, config)
        if family == "composite":
            spec_of = _library("composite").DatasetSpec
            settings["datasets"] = [
                spec_of(**{"weight": 1.0, "config": {}, **spec})
                for spec in settings.get("datasets", [])
            ]
        return _library("factory").create_dataset(family, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"reasoning-gym family {family!r} refuses the settings {dict(config)}: {error}"
        ) from error


def _with_enums(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with strings, which JSON makes of a choice among names, as enums."""
    defaults = {
        f.name: f.default for f in dataclasses.fields(_library("factory").DATASETS[family][1])
    }
    chosen = {name for name in config if isinstance(defaults.get(name), enum.Enum)}
    return {k: type(defaults[k])(v) if k in chosen else v for k, v in config.items()}


def _config_at(
    family: str, level: int | Mapping[str, int], mode: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a family at a level of its curriculum."""
    _check_family(family)
    coaching = _library("coaching.base_curriculum")
    modes = [m.value for m in coaching.RangeAttributeMode if m.value != "last_k"]
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, got {mode!r}")
    if not _library("factory").has_curriculum(family):
        raise ValueError(f"reasoning-gym has no curriculum for its family {family!r}")
    made = _library("factory").create_curriculum(family)
    highest = {name: len(attribute.levels) - 1 for name, attribute in made.attributes.items()}
    wanted = dict(level) if isinstance(level, Mapping) else {"*": level}
    for name, number in wanted.items():
        most = max(highest.values()) if name == "*" else highest.get(name, -1)
        if not 0 <= number <= most:
            raise ValueError(
                f"the curriculum of reasoning-gym family {family!r} has no level {number} of "
                f"{name!r}; the highest levels are {highest}"
            )
    made.set_global_level(wanted.pop("*", 0))
    for name, number in wanted.items():
        made.set_attr_level(name, number)
    context = coaching.DefaultCurriculumContext(mode=coaching.RangeAttributeMode(mode))
    try:
        config = made.generate_configuration(dict(defaults), context)
    except TypeError as error:
        raise ValueError(
            f"reasoning-gym family {family!r} refuses the settings {dict(defaults)}: {error}"
        ) from error
    of_attributes = ("field_name", "lower_field_name", "upper_field_name")
    found = {getattr(a, of, None) for a in made.attributes.values() for of in of_attributes}
    return {name: getattr(config, name) for name in sorted({*defaults, *found} - {None})}


def _library(module: str) -> Any:
    return import_library(f"reasoning_gym.{module}", "reasoning-gym", "envs")
