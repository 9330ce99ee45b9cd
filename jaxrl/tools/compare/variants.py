"""Read the losses and estimators to compare, as configs of runs that have them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl import config as cfg
from jaxrl.config.overrides import parse_assignments
from jaxrl.config.validation import check_objective

_BETWEEN = re.compile(r",(?![^\[\](){}]*[\])}])")  # commas, but for those inside of brackets
_CHANGE = re.compile(r"\+(?=[A-Za-z_][\w.]*=)")


@dataclass(frozen=True)
class Variant:
    """Hold a loss and an estimator, and the config of a run that has them."""

    name: str
    config: cfg.TrainConfig


Pairs = Mapping[str, tuple[str, str]]  # by name: a loss and an estimator, with changes of each


def parse_variants(
    config: cfg.TrainConfig, losses: str | Pairs, estimators: str | None
) -> list[Variant]:
    """Return every loss with every estimator, as configs.

    Args:
        config: of the run, resolved.
        losses: names or "module:function", separated by commas, each with changes of
            `trainer.algorithm`: "regular+eps_clip_high=0.28+loss_reduction=sequence_mean"; or, by a
            name of its own, each with its own estimator.
        estimators: likewise, for all losses; None: the run's own.

    Raises:
        ValueError: there is no such loss, estimator or field; the objective is incoherent.
    """
    if isinstance(losses, str):
        losses = _product(losses, estimators, config.trainer.algorithm.advantage_estimator)
    found = []
    for name, (loss, estimator) in losses.items():
        changes = _changes(config, "policy_loss", loss)
        changes |= _changes(config, "advantage", estimator)
        try:
            changed = cfg.resolve(cfg.apply_overrides(config, changes))
            cfg.check_constraints(changed.trainer.algorithm, "trainer.algorithm")
            check_objective(changed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        found.append(Variant(name, changed))
    return found


def _product(losses: str, estimators: str | None, of_run: str) -> Pairs:
    """Return every loss with every estimator, named by what was written."""
    return {
        f"{loss} | {estimator}" if estimators else loss: (loss, estimator)
        for loss in _listed(losses, "--losses")
        for estimator in _listed(estimators or of_run, "--estimators")
    }


def _listed(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in _BETWEEN.split(text)]
    if not all(names):
        raise ValueError(f"{flag}={text!r} has an empty name; write e.g. {flag}=regular,gspo")
    return names


def _changes(config: cfg.TrainConfig, kind: str, text: str) -> dict[str, Any]:
    """Return overrides of a config for "name+field=value".

    Hyperparameters of another function go.
    """
    name, *assignments = _CHANGE.split(text)
    field = {"policy_loss": "policy_loss_type", "advantage": "advantage_estimator"}[kind]
    changes: dict[str, Any] = {field: name}
    if name != getattr(config.trainer.algorithm, field):
        changes[f"{kind}_kwargs"] = {}
    changes |= parse_assignments(assignments)
    return {f"trainer.algorithm.{key}": value for key, value in changes.items()}
