"""What backend="jetstream" can be asked for."""

from typing import Any

from jaxrl.config.errors import fail
from jaxrl.config.generator import InferenceEngineConfig, SamplingParams
from jaxrl.config.train_config import TrainConfig

_ENGINE = "generator.inference_engine"


def check_jetstream(config: TrainConfig) -> None:
    """Check that JetStream servers are told what they need and asked for what they can give."""
    generator = config.generator
    engine = generator.inference_engine
    for name in ("external_server_urls", "external_proxy_url"):
        if getattr(engine, name):
            fix = "is for HTTP servers; JetStream servers go into remote_urls"
            fail(f"{_ENGINE}.{name}", getattr(engine, name), fix)
    if engine.run_engines_locally:
        if engine.remote_urls:
            fix = "has no effect with run_engines_locally=True; set that to False"
            fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
        if "engine" in engine.engine_init_kwargs:
            _check_single(engine)
        return
    _check_servers(engine)
    if generator.sampling_params.logprobs is not None:
        fail(
            "generator.sampling_params.logprobs",
            generator.sampling_params.logprobs,
            "JetStream's wire carries no log-probs; set it to None: the trainer uses its own",
        )
    said = engine.engine_init_kwargs.get("sampling") or {}
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(generator, name)
        if params is not None and (name == "sampling_params" or config.trainer.eval_interval > 0):
            _check_said(f"generator.{name}", params, said)


def _check_single(engine: InferenceEngineConfig) -> None:
    """Refuse several engines where the user's function makes one."""
    if engine.num_engines != 1:
        fix = "engine_init_kwargs['engine'] makes one engine; set it to 1"
        fail(f"{_ENGINE}.num_engines", engine.num_engines, fix)


def _check_servers(engine: InferenceEngineConfig) -> None:
    if not engine.remote_urls or any("/" in url or ":" not in url for url in engine.remote_urls):
        fix = "set the addresses of the JetStream servers, e.g. ['10.0.0.5:9000']"
        fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
    if "control" not in engine.engine_init_kwargs:
        fail(
            f"{_ENGINE}.engine_init_kwargs",
            engine.engine_init_kwargs,
            "JetStream's wire has no weight update, so training needs another way: set 'control', "
            "a function 'module:name' that is called with a folder (under weights_folder) and its "
            "version and makes the servers load it",
        )


def _check_said(field: str, params: SamplingParams, said: dict[str, Any]) -> None:
    """Check that the servers sample as the config asks, at the user's word."""
    defaults = SamplingParams(temperature=1.0)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        theirs = said.get(name, getattr(defaults, name))
        if getattr(params, name) != theirs:
            fail(
                f"{field}.{name}",
                getattr(params, name),
                f"JetStream servers cannot be told how to sample, and they are said to use "
                f"{theirs}; ask for that, or correct {_ENGINE}.engine_init_kwargs['sampling'] "
                "(evaluation alone: trainer.eval_interval=-1 turns it off)",
            )
    for name in ("additional_kwargs", "keep_sampling_mask"):
        if getattr(params, name):
            fix = "JetStream's wire has no such option; leave it off"
            fail(f"{field}.{name}", getattr(params, name), fix)
