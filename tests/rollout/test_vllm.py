"""Starting and watching server processes; a real vLLM where VLLM_PYTHON names its interpreter."""

import asyncio
import os
import signal

import numpy as np
import pytest

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.export import save_pretrained, untied
from jaxrl.models.transformer import TransformerConfig
from jaxrl.rollout.http_client import RemoteOptions, ServerError
from jaxrl.rollout.probe import Probe, WeightMismatch, make_score
from jaxrl.rollout.remote import RemoteEngine
from jaxrl.rollout.vllm import VllmServer, command_line
from jaxrl.rollout.weight_folder import WeightFolder
from tests.rollout.test_native import flat, random_params
from tests.rollout.test_remote import request

# What the supervisor sees of a server: its module, its flags, /health, and how it dies.
STAND_IN = """
import http.server, os, pathlib, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("model", flags["--model"], os.environ["VLLM_SERVER_DEV_MODE"], flush=True)
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
    assert server.log.read_text().splitlines() == [f"model {first} 1", f"model {second} 1"]
    server.stop()
    assert server._process.poll() is not None


def test_the_end_of_the_log_is_in_the_error(server, tmp_path):
    with pytest.raises(ServerError, match=r"ended with status 1\. The end of its log.*") as error:
        asyncio.run(server.ensure(tmp_path / "nothing"))
    assert str(error.value).endswith("no such model") and not error.value.retryable


# ------------------------------------------------------------------ a real vLLM, on CPUs


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


def real_engine(server, folder):
    tokenizer = load_tokenizer("configs/tiny_char_model")

    def write(params, folder):
        save_pretrained(folder, *untied(MODEL, params), tokenizer, overwrite=True)

    return RemoteEngine(
        [server.url],
        "vllm",
        weights=WeightFolder(folder, write),
        probe=Probe(make_score(MODEL, np.float32, None, 16), 40, 1e-3),
        hosts=[server],
        options=RemoteOptions(recovery_seconds=900, timeout_seconds=900),
    )


@pytest.mark.slow
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter")
def test_a_real_vllm_server(tmp_path, monkeypatch):
    """Samples, log-probs, new weights, a kill and a restart; then weights that are not used."""
    settings = {"CPU_KVCACHE_SPACE": "1", "CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in settings.items():
        monkeypatch.setenv(f"VLLM_{name}", value)
    flags = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "max_num_seqs": 16}
    server = VllmServer(flags, tmp_path / "server.log", python=os.environ["VLLM_PYTHON"])
    engine = real_engine(server, tmp_path / "weights")
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
