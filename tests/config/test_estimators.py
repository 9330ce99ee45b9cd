"""Hyperparameters of advantage estimators: what is refused before a run, and what is odd."""

import math
import re
import warnings

import pytest

from jaxrl.advantages import ROWS
from jaxrl.config import TrainConfig, validate
from jaxrl.functions import keyword_defaults

# Of 0, -1 and infinity, what means something: no discount, no weight, any threshold of rewards.
MEANT = {
    **dict.fromkeys(("gamma", "lambd", "critic_lambd", "step_gamma"), (0,)),
    **dict.fromkeys(("step_weight", "positive_weight"), (0,)),
    "threshold": (0, -1),
}
ASKED = ("grpo_loo", "maxrl")  # do not divide where the divisor is 0
NUMBERS = [
    (name, keyword, value)
    for name, row in ROWS.items()
    for keyword, default in keyword_defaults(row.fn).items()
    if type(default) in (int, float)
    for value in (0, -1, math.inf)
]


def check(name, samples=5, **kwargs):
    fields = {
        "trainer.algorithm.advantage_estimator": name,
        "trainer.algorithm.advantage_kwargs": kwargs,
        "generator.step_wise_trajectories": ROWS[name].per_turn,
        "generator.n_samples_per_prompt": samples,
    }
    validate(TrainConfig.from_cli_overrides(fields))


@pytest.mark.parametrize(("name", "keyword", "value"), NUMBERS)
def test_a_number_that_means_nothing_is_refused(name, keyword, value):
    meant = (0,) if keyword == "epsilon" and name in ASKED else MEANT.get(keyword, ())
    said = re.escape(f"trainer.algorithm.advantage_kwargs.{keyword}={value!r}: ")
    if value not in meant:
        with pytest.raises(ValueError, match=f"^{said}"):
            check(name, **{keyword: value})
        return
    try:
        check(name, **{keyword: value})
    except ValueError as error:  # a critic or a teacher is missing
        assert not re.match(said, str(error))


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("gfpo", {"keep": 1}, "keep=1: must be 2 or more: .* compared with no other"),
        ("gfpo", {"metric": "len"}, "metric='len': must be 'length' or 'token_efficiency'"),
        ("pass_at_k", {"k": 2.5}, "k=2.5: expected int"),
        ("pass_at_k", {"k": True}, "k=True: expected int"),
        ("grpo", {"epsilon": "1e-4"}, "epsilon='1e-4': is text; write 0.0001"),
        ("grpo", {"grpo_norm_by_std": "no"}, "grpo_norm_by_std='no': expected bool"),
        ("gigpo", {"step_gamma": 3.0}, r"step_gamma=3.0: must be in \[0, 1\]"),
        ("gigpo", {"epsilon": -1.0}, "epsilon=-1.0: must be positive"),
        ("gae", {"lambd": "0.9"}, "lambd='0.9': is text; write 0.9"),
        ("vapo", {"length_adaptive_alpha": None, "critic_lambd": 2}, "critic_lambd=2: must be in"),
    ],
)
def test_what_an_estimator_cannot_use_is_refused(name, kwargs, said):
    with pytest.raises(ValueError, match=rf"^trainer\.algorithm\.advantage_kwargs\.{said}"):
        check(name, **kwargs)


def test_keeping_all_samples_is_odd():
    said = "advantage_kwargs.keep=4 with generator.n_samples_per_prompt=4: all are kept, which is"
    with pytest.warns(UserWarning, match=said):
        check("gfpo", samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("gfpo", samples=4, keep=2)
