"""What the engine must hold: how many rows together, and how long."""

from jaxrl.config.errors import fail
from jaxrl.config.train_config import TrainConfig


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
