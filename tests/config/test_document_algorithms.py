"""docs/algorithms.md is what the docstrings say, and its settings are legal."""

import warnings

import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.config import AlgorithmConfig, apply_overrides, load_config_file, resolve, validate
from jaxrl.config.document_algorithms import PAGE, algorithms_page, parse_docstring
from jaxrl.config.grpo_variants import GRPO_VARIANTS
from jaxrl.losses import LOSSES
from tests.test_train import QUICKSTART


def test_the_committed_page_is_what_the_docstrings_generate():
    message = "run python -m jaxrl.config.document_algorithms"
    assert PAGE.read_text() == algorithms_page(), message


@pytest.mark.parametrize("func", [*LOSSES.values(), *ESTIMATORS.values()])
def test_every_docstring_has_its_parts(func):
    doc = parse_docstring(func)
    assert doc.summary
    assert " = " in doc.formula
    assert "Args:" not in doc.source
    assert doc.arguments


@pytest.mark.parametrize("variant", GRPO_VARIANTS, ids=lambda v: v.system)
def test_the_settings_of_the_eight_systems_are_legal(variant):
    config = load_config_file(QUICKSTART)
    config.trainer.algorithm = AlgorithmConfig()
    settings = {f"trainer.algorithm.{field}": value for field, value in variant.settings.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(resolve(apply_overrides(config, settings)))


def test_the_eight_systems_are_eight_objectives():
    assert len(GRPO_VARIANTS) == 8
    assert len({repr(variant.settings) for variant in GRPO_VARIANTS}) == 8


def test_the_anchor_of_cispo_decides_which_corrections_it_takes():
    assert "yes; with `cispo.cispo_anchor = 'rollout'` masks only" in algorithms_page()
