"""GRPO steps of Tunix's GRPOLearner with its own ("vanilla") sampler, for `grpo_step.py`.

Runs under a Python with google-tunix; jaxrl is not imported. With one update per batch Tunix
computes no old log-probs. Its sampler decodes until the longest row ends and its learner pads every
row to the limit, so short responses save it nothing.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.systems.worker import Clock, Workload, answer, reward, wait_for_step


def make_model(work: Workload, mesh: jax.sharding.Mesh, seed: int) -> nnx.Module:
    """Random weights of the architecture in config.json, a Qwen3."""
    hf = json.loads((Path(work.folder) / "config.json").read_text())
    config = qwen3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_parameters"]["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=True,
    )
    with jax.set_mesh(mesh):
        return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def make_cluster(work: Workload) -> rl_cluster.RLCluster:
    """Policy, reference and sampler on one mesh; AdamW, clipped as jaxrl clips."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(work.learning_rate, weight_decay=0.01)
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh={r: mesh for r in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer,
            eval_every_n_steps=10**9,
            max_steps=10**9,
            mini_batch_size=work.prompts,
            train_micro_batch_size=work.prompts,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=work.max_tokens,
            max_prompt_length=work.prompt_length,
            kv_cache_size=work.prompt_length + work.max_tokens,
            temperature=1.0,
            top_p=1.0,
            seed=1,
        ),
    )
    return rl_cluster.RLCluster(
        actor=make_model(work, mesh, 0),
        reference=make_model(work, mesh, 0),
        tokenizer=AutoTokenizer.from_pretrained(work.folder),
        cluster_config=config,
    )


def fix_lengths(sampler: Any, work: Workload) -> Callable[[str], None]:
    """Make row i end after lengths[i] tokens (the end-of-sequence token is not one of them).

    Returns:
        A function that chooses the workload; each has compiled functions of its own.
    """
    plain, lengths = sampler._sample, {}  # lengths of the workload that is being compiled

    def sample(logits: jax.Array, eos: jax.Array, **rest: Any) -> Any:
        generated = rest["sampler_state"].decoding_step + 1 - work.prompt_length
        ends = (lengths["now"] == generated)[:, None, None]
        is_eos = jnp.arange(logits.shape[-1]) == eos[0]
        return plain(logits=jnp.where(ends == is_eos, logits[:, -1:], -jnp.inf), eos=eos, **rest)

    def compiled() -> tuple[Any, Any]:  # of partials, which do not share their compiled code
        prefill, decode = map(functools.partial, (sampler._prefill_fn, sampler._decode_fn))
        return (
            jax.jit(prefill, donate_argnums=1, static_argnames="echo"),
            jax.jit(decode, donate_argnums=1),
        )

    functions = {name: compiled() for name in work.lengths}
    sampler._sample = sample

    def choose(workload: str) -> None:
        lengths["now"] = np.asarray(work.lengths[workload])
        sampler._compiled_prefill_fn, sampler._compiled_decode_fn = functions[workload]

    return choose


class Steps:
    """Waits for the parent before each rollout; the step ends where the next one begins."""

    def __init__(self, work: Workload, cluster: rl_cluster.RLCluster) -> None:
        self.work, self.cluster, self.clock = work, cluster, Clock()
        self.choose = fix_lengths(cluster.rollout._sampler, work)
        self.workload = ""
        clock, generate = self.clock, cluster.generate

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.finish()
            self.workload = wait_for_step()
            self.choose(self.workload)
            clock.start()
            output = timed_generate(*args, **kwargs)
            self.check([len(tokens) for tokens in output.tokens])
            return output

        def policy(_: Any) -> None:
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

        timed_generate = clock.timed(generate, lambda *_, **__: "generation", lambda _: None)
        cluster.generate = gated
        cluster.get_ref_per_token_logps = clock.timed(
            cluster.get_ref_per_token_logps, lambda *_, **__: "reference", jax.block_until_ready
        )
        cluster.update_actor = clock.timed(cluster.update_actor, lambda *_, **__: "update", policy)

    def finish(self) -> None:
        """Answer with the step that has just ended, if there was one."""
        if self.workload:
            answer(self.clock.seconds | self.clock.total())

    def check(self, lengths: list[int]) -> None:
        """The sampler kept to the workload's lengths."""
        wanted = self.work.lengths[self.workload]
        if lengths != wanted:
            raise RuntimeError(f"responses of {lengths} tokens instead of {wanted}")


def batches(work: Workload) -> Iterator[dict[str, np.ndarray]]:
    """The prompts of one step after the other, for ever."""
    prompts = itertools.cycle(work.read_prompts())
    while True:
        yield {"prompts": np.array(list(itertools.islice(prompts, work.prompts)))}


def main() -> None:
    """Train for ever, a step whenever the parent asks."""
    work = Workload.from_argv()
    cluster = make_cluster(work)
    Steps(work, cluster)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=work.samples, beta=work.kl_coef),
        reward_fns=lambda prompts, completions, **_: [reward(c) for c in completions],
    )
    answer({"jax": jax.__version__})
    learner.train(batches(work))


if __name__ == "__main__":
    main()
