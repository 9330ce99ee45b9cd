"""Whole runs whose samples come over HTTP."""

from collections import deque

import jax
import pytest

from jaxrl.models import hf
from jaxrl.models.transformer import init_params
from jaxrl.rollout.remote.probe import WeightMismatch
from jaxrl.train import BasePPOExp, train
from tests.rollout.http_servers import FakeServer
from tests.test_train import assert_trained_alike, metric_lines, small


@pytest.fixture
def servers():
    path = hf.local_folder("configs/tiny_char_model")
    config = hf.load_config(path)
    params = jax.device_put(init_params(config, 5), jax.devices()[0])
    servers = []

    def build(dialect, count):
        servers.extend(FakeServer(dialect, config, params, number) for number in range(count))
        urls = [server.url for server in servers]
        given = {"run_engines_locally": False, "remote_urls": urls, "backend": dialect}
        return servers, {f"generator.inference_engine.{k}": v for k, v in given.items()}

    yield build
    for server in servers:
        server.kill()


@pytest.mark.slow  # a whole run
def test_a_run_over_http_is_the_run_in_process(finished, servers, tmp_path):
    """Same keys, same tokens: though connections break, in generation and in an update."""
    (first, second), engine = servers("native", 2)
    first.faults["/v1/completions"] = deque([None] * 4 + ["drop", 500, "truncated"])
    second.faults["/update_weights"] = deque([None, "drop"])
    folder, in_process = finished
    trainer = train(small(tmp_path, **engine))
    trainer.engine.close()
    lines = metric_lines(tmp_path)
    for ours, expected in zip(lines, metric_lines(folder), strict=True):
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert all(line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4 for line in lines[1:])
    assert_trained_alike(trainer.state, in_process.state)
    assert first.served and second.served
    (weights,) = (tmp_path / "quickstart" / "weights").iterdir()
    assert weights.name == "version-4"


@pytest.mark.parametrize(("fault", "temperature"), [("stale", 1.0), ("raw", 0.25)])
def test_a_run_stops_at_wrong_weights_or_log_probs(servers, tmp_path, fault, temperature):
    """Log-probs before the temperature differ only where a sample is drawn with one."""
    (server,), engine = servers("vllm", 1)
    setattr(server, fault, True)
    drawn = {"generator.sampling_params.temperature": temperature}
    experiment = BasePPOExp(small(tmp_path, **engine, **drawn))
    trainer = experiment.build()
    with pytest.raises(WeightMismatch, match="update to version 0"):
        trainer.train()
    trainer.engine.close()
