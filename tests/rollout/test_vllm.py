"""Starting and watching server processes; a real vLLM where VLLM_PYTHON names its interpreter."""

import asyncio
import json
import os
import signal

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import config as cfg
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.export import save_pretrained, untied
from jaxrl.models.hf import load_config
from jaxrl.models.linear import base
from jaxrl.models.lora import LoraConfig, attach, select_modules, trained
from jaxrl.models.peft_format import save_adapter
from jaxrl.models.transformer import TransformerConfig, abstract_params
from jaxrl.rollout.build import model_writer
from jaxrl.rollout.remote.engine import RemoteEngine
from jaxrl.rollout.remote.http_client import RemoteOptions, ServerError
from jaxrl.rollout.remote.probe import Probe, WeightMismatch, make_score
from jaxrl.rollout.remote.vllm_process import VllmServer, command_line, lora_flags
from jaxrl.rollout.weights.folder import AdapterFolder, WeightFolder
from tests.rollout.test_native import flat, random_params
from tests.rollout.test_remote import request

# What the supervisor sees of a server: its module, its flags, /health, and how it dies.
STAND_IN = """
import http.server, os, pathlib, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
names = {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
print("model", flags["--model"], *names & set(os.environ), flush=True)
if not pathlib.Path(flags["--model"]).exists():
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = VllmServer({}, tmp_path / "logs" / "server.log")
    yield server
    server.stop()


def test_flags():
    flags = {"max_model_len": 64, "enforce_eager": True, "enable_lora": False, "revision": None}
    flags |= {"served_model_name": ["a", "b"], "rope_scaling": {"factor": 2}}
    assert " ".join(command_line(flags)) == (
        "--max-model-len 64 --enforce-eager --no-enable-lora --served-model-name a b "
        '--rope-scaling {"factor": 2}'
    )


def test_the_command_reports_processed_log_probs(tmp_path):
    server = VllmServer({"dtype": "float32"}, tmp_path / "log", python="py", port=1)
    assert " ".join(server.command(tmp_path)) == (
        f"py -m vllm.entrypoints.openai.api_server --dtype float32 --model {tmp_path} --host "
        "127.0.0.1 --port 1 --logprobs-mode processed_logprobs --generation-config vllm"
    )


def test_a_dead_server_is_started_again_with_the_newest_weights(server, tmp_path):
    first, second = tmp_path / "version-1", tmp_path / "version-2"
    first.mkdir(), second.mkdir()
    assert asyncio.run(server.ensure(first))
    assert not asyncio.run(server.ensure(second))  # it runs
    os.killpg(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert asyncio.run(server.ensure(second))
    opened = "VLLM_SERVER_DEV_MODE"
    assert server.log.read_text().splitlines() == [
        f"model {first} {opened}",
        f"model {second} {opened}",
    ]
    server.stop()
    assert server._process.poll() is not None


def test_a_server_with_adapters_opens_no_other_calls(server, tmp_path):
    server.flags = {"enable_lora": "yes"}  # the stand-in reads flags with values
    asyncio.run(server.ensure(tmp_path))
    assert server.log.read_text() == f"model {tmp_path} VLLM_ALLOW_RUNTIME_LORA_UPDATING\n"


def test_flags_for_adapters():
    assert lora_flags(4) == {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    assert lora_flags(64)["max_lora_rank"] == 64
    with pytest.raises(ValueError, match=r"lora\.rank=600: .*rank 512 at most; .*lora_sync_path"):
        lora_flags(600)


def test_the_end_of_the_log_is_in_the_error(server, tmp_path):
    with pytest.raises(ServerError, match=r"ended with status 1\. The end of its log.*") as error:
        asyncio.run(server.ensure(tmp_path / "nothing"))
    assert str(error.value).endswith("no such model") and not error.value.retryable


# ------------------------------------------------------------------ a real vLLM, on CPUs


@pytest.mark.parametrize("backend, dtype", [("vllm", "bfloat16"), ("native", "float32")])
def test_folders_for_vllm_are_in_its_data_type(tmp_path, backend, dtype):
    """The native sampler keeps some weights in float32; tied heads are untied for vLLM."""
    model = load_config("configs/tiny_char_model")
    engine = {"backend": backend, "model_dtype": "bfloat16"}
    config = cfg.apply_overrides(
        cfg.TrainConfig(), {f"generator.inference_engine.{k}": x for k, x in engine.items()}
    )
    write = model_writer(config, model, load_tokenizer("configs/tiny_char_model"))
    write(random_params(model), tmp_path / "version-1")
    tensors = load_file(tmp_path / "version-1" / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {dtype}
    assert ("lm_head.weight" in tensors) == (backend == "vllm")
    found = json.loads((tmp_path / "version-1" / "config.json").read_text())
    assert (found["dtype"], found["max_position_embeddings"]) == (dtype, 256)


# vLLM's attention on CPUs wants heads of 32 or more
MODEL = TransformerConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    initializer_range=0.3,
)


def write_model(params, folder):
    tokenizer = load_tokenizer("configs/tiny_char_model")
    save_pretrained(folder, *untied(MODEL, params), tokenizer, overwrite=True)


def real_engine(server, dialect, weights):
    return RemoteEngine(
        [server.url],
        dialect,
        weights=weights,
        probe=Probe(make_score(MODEL, np.float32, None, 16), 40, 1e-3),
        hosts=[server],
        options=RemoteOptions(recovery_seconds=900, timeout_seconds=900),
    )


@pytest.fixture
def real_server(tmp_path, monkeypatch):
    """Not started."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON names no interpreter")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    flags = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "max_num_seqs": 16}
    return VllmServer(flags, tmp_path / "server.log", python=os.environ["VLLM_PYTHON"])


@pytest.mark.slow
def test_a_real_vllm_server(real_server, tmp_path):
    """Samples, log-probs, new weights, a kill and a restart; then weights that are not used."""
    server = real_server
    engine = real_engine(server, "vllm", WeightFolder(tmp_path / "weights", write_model))
    old, new, other = (random_params(MODEL, seed) for seed in range(3))
    try:
        engine.update_weights(old, 1)
        before = flat(engine.generate([request()]))
        engine.update_weights(new, 2)
        after = flat(engine.generate([request()]))
        assert [s.tokens for s in before] != [s.tokens for s in after]
        greedy = flat(engine.generate([request(1, temperature=0.0)]))[0]
        scores = engine.probe.score(new, [3, 1, 4, 1, 5, *greedy.tokens], 5)
        np.testing.assert_allclose(greedy.log_probs, scores.log_probs, atol=1e-3)
        (futures,) = engine.submit([request(max_tokens=100)])
        os.killpg(server._process.pid, signal.SIGKILL)
        assert [len(future.result(timeout=900).tokens) for future in futures] == [100] * 4
        write = engine.folder.write  # the trainer goes on to `other`, the folder does not
        engine.folder = WeightFolder(tmp_path / "weights", lambda _, folder: write(new, folder))
        with pytest.raises(WeightMismatch, match="stale or wrong weights"):
            engine.update_weights(other, 3)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_real_vllm_server_with_adapters(real_server, tmp_path):
    """The base stays; samples under way, a kill and a restart; then a wrong adapter."""
    lora = LoraConfig(MODEL, select_modules(MODEL, "all-linear"), rank=4, alpha=8)
    first, second, third, other = (adapted(lora, seed) for seed in range(4))
    real_server.flags = {**real_server.flags, **lora_flags(lora.rank)}

    def write(params, folder):
        save_adapter(folder, lora, trained(params), base="a/base", overwrite=True)

    def write_base(params, folder):
        write_model(base(params), folder)

    folders = AdapterFolder(tmp_path / "sync", write, tmp_path / "base", write_base)
    engine = real_engine(real_server, "vllm_lora", folders)
    try:
        engine.update_weights(first, 1)
        greedy = flat(engine.generate([request(1, temperature=0.0)]))[0]
        scores = engine.probe.score(first, [3, 1, 4, 1, 5, *greedy.tokens], 5)
        np.testing.assert_allclose(greedy.log_probs, scores.log_probs, atol=1e-3)
        (under_way,) = engine.submit([request(1, temperature=0.0, max_tokens=120)])
        engine.update_weights(second, 2)
        engine.update_weights(third, 3)  # vLLM has room for two beside each other
        (sample,) = [future.result(timeout=900) for future in under_way]
        assert (len(sample.tokens), set(sample.versions)) == (120, {1})
        assert sample.tokens[:8] == greedy.tokens
        (futures,) = engine.submit([request(max_tokens=100)])
        os.killpg(real_server._process.pid, signal.SIGKILL)
        assert [len(future.result(timeout=900).tokens) for future in futures] == [100] * 4
        engine.folder.write = lambda _, folder: write(second, folder)
        with pytest.raises(WeightMismatch, match="stale or wrong weights"):
            engine.update_weights(other, 4)
    finally:
        engine.close()


def adapted(lora, seed):
    rng, shapes = np.random.default_rng(seed), abstract_params(lora)
    adapters = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.2, x.shape)), shapes)
    return attach(lora, random_params(MODEL), adapters)
