"""The policy gradient with a quadratic penalty."""

import jax
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.dro import ROW, dro

# New probabilities 1/2, 1/2, 1/8; ratios 4, 1, 1/2
NEW = np.log(np.array([[0.5, 0.5, 0.125]], np.float32))
OLD = NEW - np.log(np.array([[4, 1, 0.5]], np.float32))
ADVANTAGES = np.array([[1, -1, 2]], np.float32)


def test_literal_value_and_gradient():
    # beta = 1/2; L = d^2 / 4 - A log p, gradient d / 2 - A
    #   d =  1.3862944: 1.9218121 / 4 + 0.6931472     =  1.1736002; 0.6931472 - 1  = -0.3068528
    #   d =  0:         -0.6931472;                                  1
    #   d = -0.6931472: 0.4804530 / 4 + 2 * 2.0794415 =  4.2789963; -0.3465736 - 2 = -2.3465736
    def objective(log_probs):
        loss, _ = dro(log_probs, OLD, ADVANTAGES, None, beta=0.5)
        return loss.sum(), loss

    grad, loss = jax.grad(objective, has_aux=True)(NEW)
    np.testing.assert_allclose(loss, [[1.1736002, -0.6931472, 4.2789963]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-0.3068528, 1, -2.3465736]], rtol=1e-6)


def test_beta_has_no_default():
    with pytest.raises(TypeError, match="beta"):
        dro(NEW, OLD, ADVANTAGES, None)
    for kwargs in ({}, {"beta": 0.0}):
        ((field, fix),) = ROW.check(AlgorithmConfig(policy_loss_kwargs=kwargs))
        assert field == "policy_loss_kwargs.beta"
        assert "no default" in fix
    config = AlgorithmConfig(policy_loss_kwargs={"beta": 0.2})
    assert not list(ROW.check(config))
    assert ROW.formula(config) == "-A log_probs + 0.1 (log r)^2"
