"""An update and a scoring pass of groups that share a prompt: flat rows, prefix trees, torch.

    JAX_PLATFORMS=cpu python -m benchmarks.prefix_sharing --shapes 3m
    JAX_PLATFORMS=cpu python -m benchmarks.prefix_sharing --torch-python=.venv/bin/python
    JAX_PLATFORMS=cpu python -m benchmarks.prefix_sharing --tpu=v5p:2x2x1    # libtpu on the path
    python -m benchmarks.prefix_sharing --shapes qwen2.5-0.5b --bf16 --budget 16384     # on a GPU

Claim: at prompts of 512 tokens, answers of 128 and 8 samples a prompt, an update by trees takes at
most 1 / 2.5 of the time of one by flat rows on the same CPU.

A case is a number of groups whose samples have one prompt and answers of equal length, drawn at
random; the answers are trained on. An update is the gradient of the clipped policy loss in
microbatches of at most `--budget` tokens and one AdamW step, by the trainer's own `Updater`; a
scoring pass gives log-probs by its `ForwardPass`. "tokens" are those that the model runs on,
padding among them; "peak" is the compiler's figure for the gradient of the first microbatch:
arguments, results, temporaries. The systems run in turns; medians. torch (transformers, eager,
SDPA) has flat rows, and the head for the answers alone, as jaxrl has.

With `--tpu` the gradient of a microbatch is compiled ahead of time for a topology, in bfloat16 and
with full recomputation, and its memory, operations and bytes are those that the compiler states.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from benchmarks import roofline
from benchmarks.grpo_step import start
from benchmarks.shapes import SHAPES, transformer_config
from benchmarks.systems.worker import TrainWork
from jaxrl import config as cfg
from jaxrl.config import TrainConfig, resolve
from jaxrl.data.microbatches import computed_tokens, microbatches, plan_batch
from jaxrl.data.packing import empty_batch, length_bucket
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh, replicated
from jaxrl.tools.plan.topology import machine
from jaxrl.training.build import assemble_update, make_forward_pass
from jaxrl.training.optim import init_state
from jaxrl.types import TrainBatch

WARM_UP = 2  # the second runs with the layout that the first compiled for


def groups(prompt: int, answer: int, samples: int, count: int, vocabulary: int) -> TrainBatch:
    """Groups of random tokens: one prompt each, `samples` answers."""
    rng, length = np.random.default_rng(0), prompt + answer
    rows, width = count * samples, length_bucket(prompt + answer)
    tokens = np.zeros((rows, width), np.int32)
    prompts = rng.integers(3, vocabulary, (count, prompt))
    tokens[:, :prompt] = np.repeat(prompts, samples, axis=0)
    tokens[:, prompt:length] = rng.integers(3, vocabulary, (rows, answer))
    mask = np.zeros((rows, width), np.float32)
    mask[:, prompt:length] = 1
    return empty_batch(rows, width, length).replace(
        tokens=tokens,
        response_mask=mask,
        loss_mask=mask,
        old_log_probs=np.full(mask.shape, -np.log(vocabulary), np.float32) * mask,
        advantages=rng.choice([-1, 1], (rows, 1)).astype(np.float32) * mask,
        index=np.repeat(np.arange(count, dtype=np.int32), samples),
    )


class Steps:
    """The trainer's update and scoring pass of one case, by flat rows or trees."""

    def __init__(
        self,
        shape: str,
        batch: TrainBatch,
        samples: int,
        *,
        budget: int,
        sharing: str,
        bf16: bool,
        devices: Sequence[Any],
        kernel: str | None = None,
    ) -> None:
        config, rows = TrainConfig(), len(batch.index)
        config.generator.n_samples_per_prompt = samples
        trainer = config.trainer
        trainer.train_batch_size = trainer.policy_mini_batch_size = rows // samples
        trainer.prefix_sharing, trainer.max_tokens_per_microbatch = sharing, budget
        trainer.bf16 = trainer.gradient_checkpointing = trainer.use_sample_packing = bf16
        trainer.flash_attn = bf16
        if kernel is not None:
            trainer.kernels = {"tree_attention": kernel}
        model, mesh = transformer_config(shape), make_mesh(devices=devices)
        placement = place_model(model, mesh, cfg.sharding_rules(trainer.sharding_rules))
        self.model, self.mesh, self.batch = model, mesh, batch
        self.forward_pass = make_forward_pass(resolve(config), model, placement)
        _, self.like, self.updater = assemble_update(
            resolve(config), self.forward_pass, placement, 1000, model
        )
        self.optimizer = _

    def begin(self) -> "Steps":
        """Draw parameters."""
        shardings = jax.tree.map(lambda x: x.sharding, self.like.params)
        params = init_params(self.model, 0, shardings)
        self.state = init_state(self.optimizer, params, shardings, replicated(self.mesh))
        self.weights, _ = self.updater.weights(self.batch)
        return self

    def update(self) -> float:
        """Seconds of an update."""
        started = time.perf_counter()
        given = self.state, self.batch, self.weights, jax.random.key(0)
        self.state, _, _ = self.updater.update(*given)
        jax.block_until_ready(self.state)
        return time.perf_counter() - started

    def score(self) -> float:
        """Seconds of a scoring pass."""
        started = time.perf_counter()
        self.forward_pass(self.state.params, self.batch)
        return time.perf_counter() - started

    def tokens(self) -> int:
        """Count the tokens of an update that the model runs on."""
        return computed_tokens(plan_batch(self.batch, self.updater.microbatching))

    def compiled(self, params: Any, place: Any) -> Any:
        """Compile the gradient of the first microbatch."""
        weights, _ = self.updater.weights(self.batch)
        parts = microbatches((self.batch, weights), self.batch, self.updater.microbatching)
        _, rows, of_loss = next(parts)
        grads = jax.eval_shape(self.updater.zeros, params)
        grads = jax.tree.map(
            lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
            grads,
            self.like.params,
        )
        given = grads, params, *place((rows, *of_loss)), jax.random.key(0)
        return self.updater.accumulate.lower(*given).compile()


def peak(compiled: Any) -> float:
    """GiB of arguments, results and temporaries."""
    used = compiled.memory_analysis()
    donated = used.argument_size_in_bytes - used.alias_size_in_bytes
    return (donated + used.output_size_in_bytes + used.temp_size_in_bytes) / 2**30


def run_case(
    shape: str, prompt: int, samples: int, arguments: argparse.Namespace, torch: Any
) -> None:
    """Print a line for each system."""
    answer, devices = arguments.answer, jax.devices()[:1]
    batch = groups(prompt, answer, samples, arguments.groups, SHAPES[shape]["vocab_size"])
    given = {"budget": arguments.budget, "bf16": arguments.bf16, "devices": devices}
    ways = {"flat": Steps(shape, batch, samples, sharing="off", **given).begin()}
    for kernel in arguments.kernels or (None,):
        name = "tree" if kernel is None else f"tree {kernel}"
        trees = Steps(shape, batch, samples, sharing="on", kernel=kernel, **given)
        ways[name] = trees.begin()
    seconds: dict[str, list[list[float]]] = {name: [] for name in (*ways, "torch")}
    for repeat in range(-WARM_UP, arguments.repeats):
        for name, steps in ways.items():
            took = [steps.update(), steps.score()]
            seconds[name] += [took] if repeat >= 0 else []
        if torch is not None:
            took = [torch(f"{prompt}")["total"], float("nan")]
            seconds["torch"] += [took] if repeat >= 0 else []
    flat = [statistics.median(x) for x in zip(*seconds["flat"], strict=True)]
    for name, found in seconds.items():
        if not found:
            continue
        update, score = (statistics.median(x) for x in zip(*found, strict=True))
        tokens = ways[name].tokens() if name in ways else ways["flat"].tokens()
        memory = ""
        if name in ways and arguments.memory:
            steps = ways[name]
            memory = f"{peak(steps.compiled(steps.state.params, steps.updater.place)):.2f}"
        print(
            f"| {shape} | {prompt} + {answer} x {samples} | {name} | {tokens} | {update:.3f} | "
            f"{flat[0] / update:.2f} | {score:.3f} | {flat[1] / score:.2f} | {memory} |",
            flush=True,
        )


def run_topology(shape: str, prompt: int, samples: int, arguments: argparse.Namespace) -> None:
    """Print what the compiler states of the gradient of a microbatch."""
    devices = machine(arguments.tpu).devices[:1]
    batch = groups(prompt, arguments.answer, samples, arguments.groups, SHAPES[shape]["vocab_size"])
    for sharing in ("off", "on"):
        given = {"budget": arguments.budget, "bf16": True, "devices": devices}
        steps = Steps(shape, batch, samples, sharing=sharing, **given)
        spread = jax.sharding.NamedSharding(steps.mesh, jax.sharding.PartitionSpec())

        def place(tree: Any, spread: Any = spread) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=spread), tree
            )

        compiled = steps.compiled(steps.like.params, place)
        layouts = plan_batch(batch, steps.updater.microbatching)
        cost = compiled.cost_analysis()
        print(
            f"| {shape} | {prompt} + {arguments.answer} x {samples} | "
            f"{'flat' if sharing == 'off' else 'tree'} | {computed_tokens(layouts)} | "
            f"{len(layouts)} | {peak(compiled):.2f} | {cost['flops'] / 1e12:.2f} | "
            f"{cost['bytes accessed'] / 1e9:.1f} |",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases of each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["3m"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[64, 512, 2048])
    parser.add_argument("--samples", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--budget", type=int, default=24_576, help="tokens of a microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="and full recomputation, packed rows")
    parser.add_argument("--kernels", nargs="+", help="of tree_attention; default: the fastest")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--torch-python", help="Python with torch and transformers; default: none")
    parser.add_argument("--tpu", help="a topology, as `jaxrl plan` names it: compile, run nothing")
    arguments = parser.parse_args(argv)
    if arguments.tpu:
        heads = "rows | tokens | microbatches | GiB | TFLOP | GB"
        columns = 8
    else:
        print(f"{jax.devices()[0].device_kind}, load {roofline.machine_load()}")
        heads = "rows | tokens | update s | x | score s | x | GiB"
        columns = 9
    print(f"| model | prompt + answer x samples | {heads} |")
    print("|---" * columns + "|")
    for shape in arguments.shapes:
        for samples in arguments.samples:
            for prompt in arguments.prompts:
                if arguments.tpu:
                    run_topology(shape, prompt, samples, arguments)
                    continue
                with ExitStack() as stack:
                    step = None
                    if arguments.torch_python:
                        rows, length = arguments.groups * samples, prompt + arguments.answer
                        work = TrainWork(
                            model=SHAPES[shape],
                            lengths={f"{prompt}": [length] * rows},
                            max_tokens=arguments.budget,
                            bf16=arguments.bf16,
                            recompute=arguments.bf16,
                            learning_rate=1e-6,
                            answer=arguments.answer,
                        )
                        system = stack.enter_context(start("torch", arguments.torch_python, work))
                        step = system.step
                    run_case(shape, prompt, samples, arguments, step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
