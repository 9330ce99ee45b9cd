"""The update of a run, compiled for devices that need not be there; see `jaxrl.tools.plan`.

Start the benchmark with JAX_PLATFORMS=cpu, else JAX looks for the chips themselves.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.compilation import Call
from jaxrl.tools.plan import topology
from jaxrl.tools.plan.run import Run


def topology_devices(name: str) -> list[jax.Device]:
    """Devices of a TPU slice, for example "v5e:2x4", to compile for.

    Raises:
        SystemExit: libtpu is not installed, or does not know the topology.
    """
    try:
        return topology.topology_devices(name)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def assemble(
    model: TransformerConfig,
    devices: list[jax.Device],
    sizes: Mapping[str, int],
    *,
    rows: int,
    length: int,
    settings: Mapping[str, Any],
) -> Run:
    """A run of GRPO on a mesh of these axis sizes, in microbatches of `rows` rows.

    Args:
        length: tokens of a row, a bucket of `length_bucket`.
        settings: config fields by dotted name.
    """
    each = {
        "trainer.micro_train_batch_size_per_gpu": rows * sizes.get("context", 1) // len(devices),
        "trainer.train_batch_size": rows,
        "trainer.policy_mini_batch_size": rows,
        "generator.n_samples_per_prompt": 1,
        "trainer.max_prompt_length": length // 2,
        "generator.sampling_params.max_generate_length": length - length // 2,
    }
    each |= {f"trainer.policy.mesh.{axis}": size for axis, size in sizes.items()}
    config = cfg.resolve(cfg.TrainConfig.from_cli_overrides(each | dict(settings)))
    machine = topology.Machine("a benchmark's", devices, memory=float("inf"), chip=None)
    return Run(config, machine, model)


def accumulate_call(run: Run) -> Call:
    """The gradient of one microbatch."""
    return run.gradient_call(run.updater, run.params, run.state.params, run.policy.placement)
