"""A server with the quickstart's model and random weights, shared by the tests of this folder."""

import jax
import openai
import pytest

from jaxrl import config as cfg
from jaxrl.models.export import save_pretrained
from jaxrl.models.hf import load_config
from jaxrl.models.transformer import init_params
from jaxrl.rollout.server.build import make_server

CHARACTERS = "configs/tiny_char_model"


def model_folder(folder, seed):
    """The architecture of the quickstart with random weights, as a model folder."""
    from jaxrl.data.tokenizer import load_tokenizer

    model = load_config(CHARACTERS)
    save_pretrained(folder, model, init_params(model, seed), load_tokenizer(CHARACTERS))
    return folder


def serve_config(folder, **overrides):
    settings = {
        "trainer.policy.model.path": str(folder),
        "trainer.policy.model.random_init": False,
        "generator.inference_engine.http_endpoint_port": 0,
        "generator.inference_engine.served_model_name": "policy",
        "generator.inference_engine.engine_init_kwargs": {"shrink": False},  # few programs
        "serve.max_num_seqs": 16,
        "serve.max_model_len": 64,
        "serve.steps_per_dispatch": 4,
        "serve.max_samples_per_request": 8,
        "serve.weights_root": str(folder.parent),
    }
    return cfg.apply_overrides(cfg.TrainConfig(), {**settings, **overrides})


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "first", 0)


@pytest.fixture(scope="package")
def server(folder):
    running = make_server(serve_config(folder), jax.devices()[:1])
    running.start()
    yield running
    running.stop()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
