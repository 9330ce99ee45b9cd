"""The update of a run, compiled for devices that need not be there.

TPU programs compile wherever libtpu is installed (`pip install 'jax[tpu]'`, in an environment of
its own); the compiler then states what the program will need of each device. Start the benchmark
with JAX_PLATFORMS=cpu, else JAX looks for the chips themselves.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxrl import config as cfg
from jaxrl.assemble import assemble_update, make_scorer, place_model
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import ShardingRules, batch_sharding, make_mesh
from jaxrl.types import ModelRows, TrainBatch, TrainState
from jaxrl.update import Updater


def topology_devices(name: str) -> list[jax.Device]:
    """Devices of a TPU slice, for example "v5e:2x4", to compile for.

    Raises:
        SystemExit: libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit(
            f"--topology={name} needs the TPU compiler: pip install 'jax[tpu]' into an environment "
            "of its own, or leave --topology out"
        )
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # no question to a cloud's metadata server
        "TPU_ACCELERATOR_TYPE": name.replace(":", "-"),
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no chip
    }.items():
        os.environ.setdefault(variable, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # libtpu's own kinds
        raise SystemExit(f"--topology={name} is not one that libtpu knows: {error}") from error


def assemble(
    model: TransformerConfig, mesh: jax.sharding.Mesh, rows: int, settings: Mapping[str, Any]
) -> tuple[TrainState, Updater]:
    """Abstract state and update of a run of GRPO with microbatches of `rows` rows.

    Args:
        settings: config fields by dotted name.
    """
    each = {"trainer.micro_train_batch_size_per_gpu": rows // mesh.size}
    config = cfg.resolve(cfg.TrainConfig.from_cli_overrides(each | dict(settings)))
    placement = place_model(config.trainer, model, mesh)
    scorer = make_scorer(config, model, placement)
    _, state, updater = assemble_update(config, scorer, placement, 1, model)
    return state, updater


def accumulate_arguments(
    updater: Updater, state: TrainState, mesh: jax.sharding.Mesh, rows: int, length: int
) -> tuple[Any, ...]:
    """Shapes and shardings of the arguments of `updater.accumulate`, one trajectory per row."""
    sharding = batch_sharding(mesh, ShardingRules())

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ints, floats = array(jnp.int32, rows, length), array(jnp.float32, rows, length)
    of_row = array(jnp.int32, rows)
    model_rows = ModelRows(ints, ints, ints, array(jnp.bool_, rows, length))
    batch = TrainBatch(
        tokens=ints,
        lengths=of_row,
        response_mask=floats,
        loss_mask=floats,
        rewards=floats,
        rollout_log_probs=floats,
        index=of_row,
        policy_versions=of_row,
        row_ids=of_row,
        old_log_probs=floats,
        advantages=floats,
    )
    weights = jax.eval_shape(lambda batch: updater.objective.weights(batch)[0], batch)
    weights = jax.tree.map(lambda x: array(x.dtype, *x.shape), weights)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return state.params, state.params, model_rows, batch, weights, key


def lower_accumulate(
    model: TransformerConfig,
    devices: list[jax.Device],
    sizes: Mapping[str, int],
    *,
    rows: int,
    length: int,
    settings: Mapping[str, Any],
) -> tuple[TrainState, jax.stages.Lowered]:
    """The gradient of one microbatch, to be compiled for a mesh of these axis sizes.

    Returns:
        The state it is for, with its shardings, and the lowered program.
    """
    mesh = make_mesh(devices=devices, **sizes)
    state, updater = assemble(model, mesh, rows, settings)
    arguments = accumulate_arguments(updater, state, mesh, rows, length)
    return state, updater.accumulate.lower(*arguments)
