"""What the engine must hold: how many rows together, and how long."""

from typing import Any

from jaxrl.config.errors import fail
from jaxrl.config.generator import InferenceEngineConfig, SamplingParams
from jaxrl.config.train_config import TrainConfig

_ENGINE = "generator.inference_engine"


def rows_at_once(config: TrainConfig) -> int:
    """Trajectories of the larger of a training and an evaluation batch."""
    generator, trainer = config.generator, config.trainer
    return max(
        trainer.train_batch_size * generator.n_samples_per_prompt,
        trainer.eval_batch_size * generator.eval_n_samples_per_prompt,
    )


def longest_row(config: TrainConfig) -> int:
    """Most tokens of a turn's prompt and response together."""
    generator = config.generator
    assert generator.max_input_length is not None  # resolved
    phases = (generator.sampling_params, generator.eval_sampling_params)
    return generator.max_input_length + max(p.max_generate_length for p in phases if p is not None)


def check_engines(config: TrainConfig, num_devices: int) -> None:
    """Engines and their tensor parallelism fit the devices."""
    engine = config.generator.inference_engine
    for name in ("num_engines", "tensor_parallel_size"):
        if getattr(engine, name) < 1:
            fail(f"generator.inference_engine.{name}", getattr(engine, name), "must be at least 1")
    parts = engine.num_engines * engine.tensor_parallel_size
    if num_devices % parts:
        fail(
            "generator.inference_engine.num_engines",
            engine.num_engines,
            f"times tensor_parallel_size={engine.tensor_parallel_size} is {parts}, which does not "
            f"divide {num_devices} devices; choose sizes whose product does",
        )
    share = engine.gpu_memory_utilization
    if not 0 < share <= 1:
        fail(
            "generator.inference_engine.gpu_memory_utilization",
            share,
            "is a share of the memory: above 0 and at most 1",
        )


def check_jetstream(config: TrainConfig) -> None:
    """JetStream servers are told what they need, and asked for what they can give."""
    generator = config.generator
    engine = generator.inference_engine
    if engine.run_engines_locally:
        if engine.remote_urls:
            fix = "has no effect with run_engines_locally=True; set that to False"
            fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
        if engine.backend == "jetstream" and "engine" in engine.engine_init_kwargs:
            _check_single(engine)
        return
    if engine.backend != "jetstream":
        fix = f"backend={engine.backend!r} runs in this process; set it to True"
        fail(f"{_ENGINE}.run_engines_locally", False, fix)
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
    """An engine that the user's function makes is one."""
    if engine.num_engines != 1:
        fix = "engine_init_kwargs['engine'] makes one engine; set it to 1"
        fail(f"{_ENGINE}.num_engines", engine.num_engines, fix)


def _check_servers(engine: InferenceEngineConfig) -> None:
    if not engine.remote_urls or any("/" in url or ":" not in url for url in engine.remote_urls):
        fix = "set the addresses of the JetStream servers, e.g. ['10.0.0.5:9000']"
        fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
    for name in ("control", "weights_folder"):
        if name not in engine.engine_init_kwargs:
            fail(
                f"{_ENGINE}.engine_init_kwargs",
                engine.engine_init_kwargs,
                "JetStream's wire has no weight update, so training needs another way: set "
                "'weights_folder', where each version is written, and 'control', a function "
                "'module:name' that is called with a folder and its version and makes the servers "
                "load it",
            )


def _check_said(field: str, params: SamplingParams, said: dict[str, Any]) -> None:
    """The servers sample as the config asks, at the user's word."""
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
