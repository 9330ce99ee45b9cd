"""Check what a run stands on: versions, devices, memory, the functions that its config names."""

import glob
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from packaging.requirements import Requirement

from jaxrl import envs
from jaxrl.functions import import_call, import_function, origin
from jaxrl.models.adapter import AdaptedModel
from jaxrl.parallel import make_mesh
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, source_hashes
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import Finding, bad_input, failed, not_here, passed
from jaxrl.tools.plan.costs import estimated
from jaxrl.tools.plan.plan import make_plan
from jaxrl.tools.plan.topology import machine

ACCELERATORS = {  # device files, and the extra whose jax uses what is behind them
    "/dev/nvidia[0-9]*": "gpu",
    "/dev/accel[0-9]*": "tpu",
    "/dev/vfio/[0-9]*": "tpu",
}
BACKENDS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")  # numbered as jaxlib
GIB = 2**30


def versions(examined: ExaminedRun) -> Finding:
    """Check packages against what jaxrl declares, and JAX for settings that break runs."""
    del examined
    wrong = [*undeclared(), *mixed_backends(), *settings_of_jax()]
    about = f"jax {jax.__version__}, python packages against what jaxrl declares"
    if not wrong:
        return passed(0, 0, about)
    cause, fix = wrong[0]
    more = f"; {len(wrong) - 1} more: {'; '.join(c for c, _ in wrong[1:])}" if wrong[1:] else ""
    return failed(len(wrong), 0, about, cause=cause + more, fix=fix)


def undeclared() -> list[tuple[str, str]]:
    """Return installed packages whose version jaxrl does not declare: (what, fix)."""
    try:
        declared = importlib.metadata.requires("jaxrl") or ()
    except importlib.metadata.PackageNotFoundError:
        cause = "jaxrl is not installed, so that nothing declares which versions it needs"
        return [(cause, "pip install -e . in its folder")]
    wrong = []
    for line in declared:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found == "missing" or not needed.specifier.contains(found, prereleases=True):
            fix = f"pip install '{needed.name}{needed.specifier}'"
            wrong.append((f"{needed.name} is {found}, jaxrl needs {needed.specifier}", fix))
    return wrong


def mixed_backends() -> list[tuple[str, str]]:
    """Return plugins of accelerators that are not of jaxlib's version: (what, fix)."""
    ours, wrong = importlib.metadata.version("jaxlib"), []
    for name in BACKENDS:
        try:
            theirs = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if theirs.split(".")[:3] != ours.split(".")[:3]:
            fix = f"pip install '{name}=={ours}'"
            wrong.append((f"{name} is {theirs}, jaxlib {ours}: they must be the same", fix))
    return wrong


def settings_of_jax() -> list[tuple[str, str]]:
    """Return settings of JAX that nobody wants in a run: (what, fix)."""
    bad = {
        "jax_enable_x64": "numbers become 64 bits wide, and sampled tokens others",
        "jax_disable_jit": "every operation runs by itself",
    }
    return [
        (f"{name}=True: {why}", f"unset {name.upper()}")
        for name, why in bad.items()
        if jax.config.values.get(name)
    ]


def devices(examined: ExaminedRun) -> Finding:
    """Check that an accelerator that is there is used, and that devices add up what they hold."""
    del examined
    here, count = jax.default_backend(), len(jax.devices())
    kinds = sorted({device.device_kind for device in jax.devices()})
    about = f"{count} x {', '.join(kinds)}"
    found = [extra for files, extra in ACCELERATORS.items() if glob.glob(files)]
    if here == "cpu" and found and "cpu" not in (jax.config.values["jax_platforms"] or ""):
        return failed(
            "cpu",
            "",
            about,
            cause="there is an accelerator in this machine, and JAX runs on the CPU",
            fix=f"pip install 'jaxrl[{found[0]}]', or set JAX_PLATFORMS=cpu to mean it",
        )
    if len(kinds) > 1:
        fix = "start with those of one kind alone (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_DEVICES)"
        cause = f"devices of several kinds: {', '.join(kinds)}"
        return failed(len(kinds), 1, about, cause=cause, fix=fix)
    mesh = make_mesh(data=-1)
    rows = np.arange(count * 128, dtype=np.float32).reshape(count, 128)
    placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    total, expected = float(jax.jit(jnp.sum)(placed)), float(rows.sum(dtype=np.float64))
    off = abs(total - expected) / expected
    if off > 1e-6:
        cause = f"the sum of {rows.size} numbers over {count} devices is {total}, not {expected}"
        return failed(off, 1e-6, about, cause=cause, fix="find the device that adds wrongly")
    return passed(off, 1e-6, about)


def memory(examined: ExaminedRun) -> Finding:
    """Check that the whole run, not the small one, fits by the estimate of `jaxrl.plan`."""
    here, config, full = machine(), examined.full_config, examined.full_experiment
    try:
        model, full.tokenizer = full.get_model(), full.get_tokenizer()
        full.check_ids(model, [], [])
    except (ValueError, OSError) as error:
        raise bad_input(config, error) from error
    if isinstance(model, AdaptedModel):
        return not_here("jaxrl.plan knows no flax modules")
    plan = make_plan(config, here, estimated)
    figure, bound = plan.peak.peak / GIB, here.memory / GIB
    about = f"GiB of a device in {plan.peak.phase.name}, estimated for the whole run"
    if plan.fits:
        return passed(round(figure, 3), round(bound, 3), about)
    return failed(
        round(figure, 3),
        round(bound, 3),
        about,
        cause=plan.refusal or f"{plan.peak.phase.name} needs more memory than a device has",
        fix="python -m jaxrl.plan --config=... names the smallest changes that make it fit",
    )


def functions(examined: ExaminedRun) -> Finding:
    """Check that all functions that the config names are there.

    They are losses, estimators, rewards, callbacks and environments.
    """
    config = examined.full_config
    algorithm = config.trainer.algorithm
    rewards, callbacks = config.environment.reward_functions, config.trainer.watching.callbacks
    prompts = examined.trainer.train_prompts
    environments = sorted({p.env_class for p in prompts} or {config.environment.env_class})
    wrong: list[str] = []

    def look_up(find: Callable[..., Any], name: str, *kind: str) -> Any:
        try:
            return find(name, *kind)
        except Exception as error:
            wrong.append(f"{name}: {error}")
            return None

    look_up(PolicyLossRegistry.resolve, algorithm.policy_loss_type)
    look_up(AdvantageEstimatorRegistry.resolve, algorithm.advantage_estimator)
    named = [look_up(import_call, path, "reward function") for path in rewards]
    # a callback is made without arguments
    named += [look_up(import_function, path, "callback") for path in callbacks]
    for name in environments:
        look_up(envs.load, name)
    of_user = [*source_hashes(algorithm), *(origin(f) for f in named if f is not None)]
    about = (
        f"loss, estimator, {len(rewards) + len(callbacks)} functions, "
        f"environments {', '.join(environments)}"
    )
    about += f"; of your own: {', '.join(of_user)}" if of_user else ""
    if not wrong:
        return passed(0, 0, about)
    return failed(
        len(wrong), 0, about, cause=wrong[0], fix="install it, or mend the name in the config"
    )
