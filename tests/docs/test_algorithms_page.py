"""docs/algorithms.md is what the docstrings say, and its settings are legal."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from docs.generate.algorithms import PAGE, page, parse_docstring
from docs.generate.grpo_variants import GRPO_VARIANTS
from jaxrl.advantages import ESTIMATORS
from jaxrl.config import (
    AlgorithmConfig,
    TrainConfig,
    apply_overrides,
    load_config_file,
    resolve,
    validate,
)
from jaxrl.losses import LOSSES
from jaxrl.losses.off_policy import off_policy_correction

pytestmark = pytest.mark.check
QUICKSTART = str(PAGE.parents[1] / "configs" / "quickstart.py")


def test_the_committed_page_is_what_the_docstrings_generate():
    assert PAGE.read_text() == page(), "run python -m docs.generate"


@pytest.mark.parametrize(("page", "functions"), [("losses", LOSSES), ("advantages", ESTIMATORS)])
def test_the_reference_has_every_loss_and_estimator(page, functions):
    lines = (PAGE.parent / f"api/{page}.md").read_text().splitlines()
    assert {f"::: {f.__module__}.{f.__name__}" for f in functions.values()} <= set(lines)


def check_docstring(func):
    doc = parse_docstring(func)
    assert doc.summary
    assert " = " in doc.formula
    assert "Args:" not in doc.source
    assert doc.arguments


def test_every_docstring_has_its_parts():
    wrong = []
    for func in (*LOSSES.values(), *ESTIMATORS.values()):
        try:
            check_docstring(func)
        except Exception as error:
            wrong.append(f"{func.__name__}: {error!r}")
    assert not wrong, "\n".join(wrong)


def check_settings(config, variant):
    settings = {f"trainer.algorithm.{field}": value for field, value in variant.settings.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validate(resolve(apply_overrides(config, settings)))
    said = [str(warning.message).partition(":")[0] for warning in caught]
    k3 = "trainer.algorithm.kl_estimator_type='k3' with kl_loss_coef=0.01"
    assert said == ([k3] if variant.system == "NeMo-RL" else [])  # its own choice, with that slope


def test_the_settings_of_the_eight_systems_are_legal():
    config, wrong = load_config_file(QUICKSTART), []
    config.trainer.algorithm = AlgorithmConfig()
    for variant in GRPO_VARIANTS:
        try:
            check_settings(config, variant)
        except Exception as error:
            wrong.append(f"{variant.system}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_the_sequence_mask_of_trl_weighs_what_it_keeps():
    config = TrainConfig()
    (trl,) = (variant for variant in GRPO_VARIANTS if variant.system == "TRL")
    settings = {f"trainer.algorithm.{field}": value for field, value in trl.settings.items()}
    config = apply_overrides(config, settings)
    # ratios of two sequences of one token: 2 is kept and weighs 2, 4 is above the cap of 3
    old, mask = jnp.log(jnp.array([[2.0], [4.0]])), jnp.ones((2, 1))
    correction = config.trainer.algorithm.off_policy_correction
    weights, kept, _ = off_policy_correction(old, jnp.zeros((2, 1)), mask, correction)
    np.testing.assert_allclose(weights * kept, [[2.0], [0.0]], rtol=1e-6)


def test_the_eight_systems_are_eight_objectives():
    assert len(GRPO_VARIANTS) == 8
    assert len({repr(variant.settings) for variant in GRPO_VARIANTS}) == 8


def test_the_anchor_of_cispo_decides_which_corrections_it_takes():
    assert "yes; with `cispo.cispo_anchor = 'rollout'` masks only" in page()
