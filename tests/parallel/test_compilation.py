"""The cache on disk, and the count of compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.parallel.compilation import CompilationWatch, enable_cache, lowering


def test_a_new_shape_is_one_compilation_and_an_old_one_none():
    @jax.jit
    def twice_for_test(x):
        return 2 * x

    three, four = jnp.ones(3), jnp.ones(4)  # compiled outside
    twice_for_test(three)
    with CompilationWatch() as watch:
        twice_for_test(three)
        assert watch.take() == ([], 0)
        twice_for_test(four)
        names, seconds = watch.take()
        assert names == ["jit(twice_for_test)"] and seconds > 0
        assert watch.take() == ([], 0)
    twice_for_test(jnp.ones(5))
    assert watch.take() == ([], 0)


def test_a_function_within_one_that_is_lowered_is_itself():
    class Owner:
        inner = staticmethod(jax.jit(lambda x: 3 * x))
        outer = staticmethod(jax.jit(lambda x: Owner.inner(x) + 1))

    with lowering([(Owner, "inner"), (Owner, "outer")]) as programs:
        assert list(Owner.outer(jnp.ones(2))) == [0, 0]  # nothing is run
    assert len(programs) == 1
    np.testing.assert_array_equal(Owner.outer(jnp.ones(2)), [4, 4])  # 3 x 1 + 1, as it was lowered


@pytest.fixture(name="no_cache")
def no_cache_fixture():
    """JAX without the cache of the test session."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("no_cache")
def test_the_cache_is_set_once_and_what_is_set_outranks_the_config(tmp_path):
    enable_cache(None)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    enable_cache(str(tmp_path))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    enable_cache("/elsewhere")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
