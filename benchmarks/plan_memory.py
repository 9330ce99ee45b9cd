"""The memory that `jaxrl.plan` promises for an update, and what the process then really takes.

    JAX_PLATFORMS=cpu python -m benchmarks.plan_memory [--json=FILE]

Claim: on one CPU device the plan's peak of gradient and apply is within 20 % of the growth of the
process's resident memory during them, for a step of at least 2 GB.

Both programs are compiled first: what the compiler takes is not the run's. Then the state is made
and one update of one microbatch is run; the growth is the highest resident size after that (VmHWM,
reset before) less the size before. Linux only.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import ahead_of_time
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models.remat import REMAT_POLICIES
from jaxrl.models.transformer import init_params
from jaxrl.parallel import replicated
from jaxrl.tools.plan.costs import Compiler
from jaxrl.tools.plan.phases import phases
from jaxrl.tools.plan.plan import beside, residents
from jaxrl.tools.plan.run import Run
from jaxrl.training.build import assemble_optimizer
from jaxrl.training.optim import init_state

GIB = 2**30


def resident(name: str) -> int:
    """VmRSS, or VmHWM, the highest so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def planned_peak(run: Run) -> dict[str, float]:
    """Bytes of the device in each phase of the update."""
    found, compiler = phases(run, None), Compiler()
    stay = residents(run, found)
    return {
        phase.name: beside(phase, stay) + compiler(phase).peak
        for phase in found
        if phase.kind in ("gradient", "apply")
    }


def measured_growth(run: Run) -> int:
    """Bytes by which the process grows at most, with the state of a run and one update."""
    updater, shardings = run.updater, jax.tree.map(lambda x: x.sharding, run.state)
    call = ahead_of_time.accumulate_call(run)
    gradient, apply = call.lower().compile(), updater.apply.lower(run.state, run.state.params)
    apply = apply.compile()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    params = init_params(run.model, 0, shardings.params)
    optimizer, _ = assemble_optimizer(run.config.trainer, 1)
    state = init_state(optimizer, params, shardings.params, replicated(run.mesh))
    del params
    given = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), call.args[2:-1])
    grads = updater.zeros(state.params)
    grads, _ = gradient(grads, state.params, *given, jax.random.key(0))
    state, _ = apply(state, grads)
    jax.block_until_ready(state)
    return resident("VmHWM") - before


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--remat", choices=list(REMAT_POLICIES), default="none")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape")
    arguments = parser.parse_args(argv)
    rows, length = (2, 16) if arguments.smoke else (arguments.rows, arguments.length)
    shape = "smoke" if arguments.smoke else arguments.shape
    run = ahead_of_time.assemble(
        transformer_config(shape),
        jax.devices()[:1],
        {},
        rows=rows,
        length=length,
        settings={
            "trainer.remat_policy": arguments.remat,
            "trainer.algorithm.use_kl_loss": False,
        },
    )
    planned = planned_peak(run)
    for phase, size in planned.items():
        print(f"planned {phase:<10}{size / GIB:>8.3f} GiB")
    grown, peak = measured_growth(run), max(planned.values())
    print(f"measured growth   {grown / GIB:>8.3f} GiB, planned / measured {peak / grown:.3f}")
    if arguments.json:
        report = {"shape": shape, "rows": rows, "length": length, "remat": arguments.remat}
        report |= {"planned": planned, "measured": grown}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
