"""The coefficient of the entropy moves until the entropy is what is asked for."""

import pytest

from jaxrl.losses.adaptive_entropy import adaptive_entropy_coef, used_entropy_coef


@pytest.mark.parametrize(
    ("coef", "entropy", "after", "used"),
    [
        (0.1, 0.1, 0.105, 0.105),  # below the target: up
        (0.1, 0.2, 0.105, 0.105),  # at it, too
        (0.1, 0.3, 0.095, 0.0),  # above: down, and it does not count
        (0.003, 0.3, 0.0, 0.0),  # not below 0
        (0.999, 0.1, 1.0, 1.0),  # not above the largest
    ],
)
def test_literal(coef, entropy, after, used):
    found = adaptive_entropy_coef(coef, entropy, target=0.2, delta=0.005, maximum=1.0)
    assert found == pytest.approx(after, abs=1e-7)
    assert used_entropy_coef(found, entropy, target=0.2) == pytest.approx(used, abs=1e-7)
