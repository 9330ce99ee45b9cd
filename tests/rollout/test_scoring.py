"""The log-probs that an engine tells of a prompt's own tokens, against the model's forward."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.engine import NativeEngine
from tests.models.test_recurrence import DELTA
from tests.models.test_transformer import logits_of
from tests.rollout.test_native import CONFIGS, engine_of, random_params, request

PROMPT = np.random.default_rng(0).integers(0, 32, 60)  # two pages with what the rows have beside


def log_probs_of(config, params, row):
    tokens, places = np.array(row)[None], np.arange(len(row))[None]
    return np.asarray(
        jax.nn.log_softmax(logits_of(config, params, tokens, places, np.ones_like(tokens))[0])
    )


def assert_scored(found, config, params, row):
    expected = log_probs_of(config, params, row)[:-1]
    own = expected[np.arange(len(row) - 1), row[1:]]
    np.testing.assert_allclose(found.log_probs, own, atol=1e-5)
    assert (found.ranks == 1 + (expected > own[:, None]).sum(axis=1)).all()
    np.testing.assert_allclose(found.top_log_probs, -np.sort(-expected, axis=1)[:, :20], atol=1e-5)
    best = found.ranks == 1  # then both are one number, to the last bit
    assert (found.log_probs[best] == found.top_log_probs[best, 0]).all()
    assert (found.top_ids[best, 0] == np.array(row)[1:][best]).all()


@pytest.mark.parametrize(
    ("name", "length"), [("llama", 1), ("llama", 17), ("llama", 200), ("gemma3", 60)]
)
def test_scores_are_those_of_the_forward(name, length):
    row = np.random.default_rng(length).integers(0, 32, length).tolist()
    found = engine_of(name).score(row)
    assert_scored(found, CONFIGS[name], random_params(CONFIGS[name]), row)


def test_a_model_that_keeps_states_and_devices_that_share_heads_and_rows():
    params = init_params(DELTA, 0)
    engine = NativeEngine(DELTA, make_mesh(devices=jax.devices()[:1]), max_num_seqs=2)
    engine.update_weights(params, 1)
    row = PROMPT.tolist()
    assert_scored(engine.score(row), DELTA, params, row)
    mesh = make_mesh(devices=jax.devices()[:4], tensor=2)
    spread = NativeEngine(CONFIGS["llama"], mesh, max_num_seqs=4)
    params = random_params(CONFIGS["llama"])
    spread.update_weights(params, 1)
    assert_scored(spread.score(row), CONFIGS["llama"], params, row)


def test_samples_that_run_meanwhile_stay_as_they_are():
    engine, row = engine_of("llama"), PROMPT.tolist()
    asked = [request([3, 1, 4], key, max_tokens=30) for key in range(4)]
    alone = engine.generate(asked)
    together = engine.submit(asked)
    scored = [engine.score(row) for _ in range(3)]
    assert [[f.result() for f in group] for group in together] == alone
    for found in scored:
        assert_scored(found, CONFIGS["llama"], random_params(CONFIGS["llama"]), row)


def test_weights_that_come_in_the_middle_score_the_whole_prompt():
    config, row = CONFIGS["llama"], PROMPT.tolist() * 3
    engine = NativeEngine(config, make_mesh(devices=jax.devices()[:1]), max_num_seqs=2)
    engine.update_weights(random_params(config, 0), 0)
    engine.score(row)
    scorer, begun = engine._scorer, []
    weights_of, new = scorer._weights, random_params(config, 1)

    def weights():
        begun.append(threading.current_thread())
        if len(begun) == 3:  # the shapes, and one of two chunks: then an update that has the lock
            engine.programs.load(new)
            engine.version = 1
        return weights_of()

    scorer._weights = weights
    assert_scored(engine.score(row), config, new, row)
    assert len(begun) == 6


def test_nobody_waits_while_the_program_is_compiled():
    config, row = CONFIGS["llama"], PROMPT.tolist()
    engine = NativeEngine(config, make_mesh(devices=jax.devices()[:1]), max_num_seqs=2)
    engine.update_weights(random_params(config), 0)
    real, begun, done = engine.programs.functions, threading.Event(), threading.Event()

    class Slow:
        def lower(self, *given):
            begun.set()
            assert done.wait(60)
            return real.score.lower(*given)

    engine.programs.functions = real._replace(score=Slow())
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(engine.score, row)
        assert begun.wait(60)
        engine.generate([request([3, 1, 4], 1)])
        done.set()
        assert_scored(scored.result(), config, random_params(config), row)


def test_several_engines_score_as_one():
    engine, row = engine_of("llama"), PROMPT.tolist()
    balancer = Balancer([engine])
    assert balancer.scores
    assert (balancer.score(row).log_probs == engine.score(row).log_probs).all()


def test_an_engine_without_weights_says_so():
    engine = NativeEngine(CONFIGS["llama"], make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(RuntimeError, match="no weights"):
        engine.score([1, 2])
