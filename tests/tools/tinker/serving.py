"""A service of the tiny model on loopback, and the public SDK as its client."""

import contextlib
import warnings
from pathlib import Path

import tinker
from tinker import types

from jaxrl import config as cfg
from jaxrl.config import load_config_file, to_train_config
from jaxrl.tools.tinker.build import Server, make_server

KEY, OTHER_KEY = "tml-first-key-aaaaaaaa", "tml-other-key-bbbbbbbb"
CHANGES = {
    "trainer.logger": "console",
    "tinker.max_rank": 8,
    "tinker.adapters": 4,
    "tinker.samplers": 3,
    "tinker.row_tokens": 128,
    "serve.max_num_seqs": 8,
    "serve.max_model_len": 128,
    "generator.inference_engine.http_endpoint_port": 0,
}
BASE = "tiny_char_model"


def config(root: Path, **changes) -> cfg.TrainConfig:
    quickstart = to_train_config(load_config_file("configs/quickstart.py"))
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return cfg.apply_overrides(quickstart, {"tinker.root": str(root)} | CHANGES | named)


@contextlib.contextmanager
def serving(root: Path, **changes):
    server = make_server(config(root, **changes))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def client(server: Server | str, key: str = KEY):
    """A client of the SDK in a session of its own."""
    url = server if isinstance(server, str) else server.url
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's own deprecations
        service = tinker.ServiceClient(base_url=url, api_key=key)
        try:
            yield service
        finally:
            service.close("success").result()


def trainer(service, rank=4, seed=1, **kinds):
    return service.create_lora_training_client(BASE, rank=rank, seed=seed, **kinds).result()


def datum(tokens, **inputs) -> types.Datum:
    """Tokens that predict each the next, with inputs for all but the first."""
    inputs = {"target_tokens": list(tokens[1:])} | inputs
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs
    )


def log_probs(output):
    return [found["logprobs"].to_numpy() for found in output.loss_fn_outputs]
