"""The engine over HTTP against jaxrl's own server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.packing import collate, token_level
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.export import save_pretrained
from jaxrl.models.hf import load_config
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.remote.engine import RemoteEngine, RemoteEngineError
from jaxrl.rollout.remote.http_client import RemoteOptions
from jaxrl.rollout.remote.probe import Probe, make_score
from jaxrl.rollout.server.build import make_server
from jaxrl.rollout.weights.folder import WeightFolder
from tests.rollout.scripted import converse, make_prompt
from tests.rollout.server.conftest import CHARACTERS, model_folder, serve_config
from tests.rollout.server.scripted import TypingEngine, serving
from tests.rollout.server.test_server import ask, until

TOKENIZER = load_tokenizer(CHARACTERS)
MODEL = load_config(CHARACTERS)
PARAMS = jax.device_put(init_params(MODEL, 3), jax.devices()[0])


def write(params, folder):
    save_pretrained(folder, MODEL, params, overwrite=True)


def engine_of(server, root, token="secret"):
    return RemoteEngine(
        [server.url.removesuffix("/v1")],
        "native",
        weights=WeightFolder(root, write),
        probe=Probe(make_score(MODEL, jnp.float32, None, 16), MODEL.vocab_size, 1e-3),
        options=RemoteOptions(model="policy", token=token, timeout_seconds=300),
    )


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_SERVE_TOKEN", "secret")
    running = make_server(serve_config(model_folder(tmp_path / "first", 0)), jax.devices()[:1])
    running.start()
    yield running
    running.stop()


def test_same_keys_same_tokens_as_in_process(server, tmp_path):
    sampling = Sampling(max_tokens=6, temperature=0.8, top_p=0.9, stop_token_ids=(4,))
    asked = [Request((3, 1, 4), ((1, 2), (1, 3)), sampling), Request((5, 9), ((7, 7),), sampling)]
    engine = engine_of(server, tmp_path / "weights")
    engine.update_weights(PARAMS, 5)
    one = make_mesh(devices=jax.devices()[:1])
    inside = NativeEngine(MODEL, one, max_num_seqs=8, shrink=False)
    inside.update_weights(PARAMS, 5)
    for group, same in zip(engine.generate(asked), inside.generate(asked), strict=True):
        for ours, theirs in zip(group, same, strict=True):
            assert (ours.tokens, ours.versions) == (theirs.tokens, theirs.versions)
            assert ours.context_versions == theirs.context_versions == [5] * len(ours.tokens)
            assert ours.stop_reason == theirs.stop_reason
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
    with pytest.raises(ValueError, match=r"Sampling\.logprobs is not available from a native"):
        engine.submit([Request((3,), ((1, 2),), Sampling(max_tokens=2, logprobs=1))])
    engine.close()


def test_what_the_server_forbids_is_said(server, tmp_path, tmp_path_factory):
    elsewhere = engine_of(server, tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(RemoteEngineError, match=r"403: .*outside of serve\.weights_root"):
        elsewhere.update_weights(PARAMS, 5)
    elsewhere.close()
    stranger = engine_of(server, tmp_path / "weights", token="wrong")
    with pytest.raises(RemoteEngineError, match="401"):
        stranger.update_weights(PARAMS, 5)
    stranger.close()


@pytest.mark.parametrize("stop", ["/abort", "/pause", "/pause?mode=abort"])
def test_what_is_aborted_before_its_first_token_is_an_ended_trajectory(stop):
    """As the trainer has it, from the worker's route to its arrays."""
    typing = TypingEngine([1, 2, 45])  # "12", and the end
    typing.halted = True
    weights = None, Path(), SimpleNamespace(forget=lambda: None)
    with serving(typing, TOKENIZER, weights) as worker, ThreadPoolExecutor(1) as pool:
        url, options = worker.url.removesuffix("/v1"), RemoteOptions(model="org/policy")
        engine = RemoteEngine([url], "native", weights=None, probe=None, options=options)
        prompts = [make_prompt(TOKENIZER, uid=f"0:{i}", says=[None]) for i in (0, 1)]
        run = pool.submit(converse, None, prompts, TOKENIZER, engine=engine)
        until(lambda: len(typing.open) == 2)
        assert ask(worker, stop, {} if stop == "/abort" else None)[0] == 200
        first = run.result()
        assert ask(worker, "/resume")[0] == 200
        second = converse(None, prompts, TOKENIZER, engine=engine)
        engine.close()
    assert first["stop_reasons"] == ["abort"] * 2
    assert first["response_ids"] == first["loss_masks"] == first["rewards"] == [[]] * 2
    assert first["policy_versions"] == [-1] * 2
    assert second["response_ids"] == [[1, 2, 45]] * 2
    both = {k: first[k] + second[k] for k in first if isinstance(first[k], list)}
    shaped = token_level(both, zero_reward_on_non_stop=False, apply_overlong_filtering=False)
    batch = collate(shaped, [0, 0, 1, 1])
    assert batch.loss_mask.sum(1).tolist() == [0, 0, 3, 3]
    assert batch.rewards.sum(1).tolist() == [0, 0, 1, 1]
    assert batch.policy_versions.tolist() == [-1, -1, 0, 0]
