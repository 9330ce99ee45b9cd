"""Make the runs in this folder: `python tests/data/stage1/make.py`, in an empty copy of the folder.

They were made once, at commit 7a33ecd, and are kept as they are: see README.md. The script shows
how, and makes runs of another version beside them when a format changes on purpose.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

STEPS, SAVED, KILLED = 4, 2, 4  # steps of a run; the last checkpoint; SIGKILL in the update of this
KINDS = {
    "full": {
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.kl_estimator_type": "k2",
        "trainer.policy.optimizer_config.scheduler": "linear",
    },
    "lora": {
        "trainer.policy.model.lora.rank": 2,
        "trainer.policy.model.lora.alpha": 3,
        "trainer.policy.model.lora.dropout": 0.2,
        "trainer.algorithm.policy_loss_type": "dual_clip",
        "trainer.algorithm.advantage_estimator": "grpo",
    },
    "critic": {
        "trainer.critic.model.path": "model",
        "trainer.critic.model.random_init": True,
        "trainer.critic.optimizer_config.lr": 1e-3,
        "trainer.critic_mini_batch_size": 4,
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.gamma": 1.0,
        "trainer.algorithm.use_kl_in_reward": True,
        "trainer.algorithm.kl_estimator_type": "k1",
        "trainer.algorithm.kl_ctrl.type": "adaptive",
        "trainer.update_epochs_per_batch": 2,
        "trainer.update_ref_every_epoch": True,
        "trainer.epochs": 2,
    },
    "lockstep": {
        "trainer.fully_async": {"enabled": True, "schedule": "lockstep", "max_staleness_steps": 1},
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.policy_loss_type": "rollout_is",
    },
    "free": {
        "trainer.fully_async": {"enabled": True, "schedule": "free", "max_staleness_steps": 2},
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.policy_loss_type": "decoupled_ppo",
    },
}
# One device, and instructions that every x86 machine of today has: bits are those of the machine.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # the tests set it
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_cpu_max_isa=AVX2",
}


def config_of(kind):
    """Return the config of a run in `runs/<kind>`, with paths that begin at the working folder."""
    from jaxrl import config as cfg

    settings = {
        "data.train_data": ["jaxrl.envs.sort_digits:prompts(size=24, seed=0)"],
        "data.val_data": ["jaxrl.envs.sort_digits:prompts(size=4, seed=1)"],
        "environment.env_class": "sort_digits",
        "environment.skyrl_gym.max_env_workers": 0,
        "generator.n_samples_per_prompt": 4,
        "generator.max_num_seqs": 16,
        "generator.sampling_params.max_generate_length": 6,
        "trainer.policy.model.path": "model",
        "trainer.policy.model.random_init": True,
        "trainer.policy.optimizer_config.lr": 2e-3,
        "trainer.algorithm.advantage_estimator": "grpo_token",
        "trainer.algorithm.gamma": 0.0,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.algorithm.use_entropy_loss": True,
        "trainer.algorithm.entropy_loss_coef": 0.01,
        "trainer.epochs": 1,
        "trainer.max_training_steps": STEPS,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 8,
        "trainer.max_prompt_length": 16,
        "trainer.eval_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.ckpt_interval": SAVED,
        "trainer.max_ckpts_to_keep": -1,
        "trainer.logger": ["console"],
        "trainer.run_name": kind,
        "trainer.log_path": "runs",
        "trainer.ckpt_path": f"runs/{kind}/checkpoints",
        "trainer.export_path": f"runs/{kind}/exports",
    }
    config = cfg.to_train_config(cfg.default_config())
    return cfg.apply_overrides(config, {**settings, **KINDS[kind]})


def run(kind, *, killed):
    """Run `runs/<kind>` from its last checkpoint, or from its start."""
    from jaxrl.train import BasePPOExp
    from jaxrl.trainer import Trainer

    update = Trainer.update

    def killed_in(self, batch, step):
        if step == KILLED:
            while not Path(f"runs/{kind}/checkpoints/global_step_{SAVED}").exists():
                time.sleep(0.1)  # it is written beside the steps
            os.kill(os.getpid(), 9)
        return update(self, batch, step)

    if killed:
        Trainer.update = killed_in
    BasePPOExp(config_of(kind)).run()


def recorded(kind):
    """Return step -> checksums of all arrays, as `runs/<kind>/run.db` has them."""
    with sqlite3.connect(f"runs/{kind}/run.db") as db:
        rows = db.execute("SELECT step, checksums FROM steps").fetchall()
    return {step: dict(json.loads(numbers)) for step, numbers in rows}


def arithmetic():
    """Return a checksum of how this machine rounds: bits of products, sums and functions."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    drawn = np.random.RandomState(0)
    x, y, z = (jnp.float32(drawn.randn(*shape)) for shape in ((32, 24), (24, 48), (4, 8, 24)))

    @jax.jit
    def numbers(x, y, z):
        hidden = jax.nn.silu(x @ y) @ y.T
        hidden *= jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True))
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", z, z))
        return jax.nn.log_softmax(hidden @ y), jnp.einsum("bts,bsd->btd", scores, jnp.cos(z))

    def loss(*arrays):
        return sum(jnp.sum(jnp.tanh(out)) for out in numbers(*arrays))

    outputs = jax.device_get((numbers(x, y, z), jax.grad(loss, (0, 1, 2))(x, y, z)))
    return zlib.crc32(b"".join(np.asarray(out).tobytes() for out in jax.tree.leaves(outputs)))


def main():
    """Run every kind whole, for what it should end with; then again, killed."""
    expected = {}
    for kind in KINDS:
        for killed in (False, True):
            shutil.rmtree(f"runs/{kind}", ignore_errors=True)
            command = [sys.executable, __file__, kind, *(["killed"] if killed else [])]
            status = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False)
            assert status.returncode == (-9 if killed else 0), kind
            if not killed and kind != "free":  # a free run goes by the clock
                expected[kind] = {n: c for n, c in recorded(kind).items() if n > SAVED}
    os.environ |= ENVIRONMENT
    expected["arithmetic"] = arithmetic()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else run(sys.argv[1], killed=len(sys.argv) > 2)
