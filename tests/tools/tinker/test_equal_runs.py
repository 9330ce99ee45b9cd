"""What jaxrl.sft and jaxrl.train do, done over the API: the same losses and the same adapters."""

import json
import shutil

import jax
import numpy as np
import pytest
from tinker import types

from jaxrl import config as cfg
from jaxrl.config import load_config_file, to_train_config
from jaxrl.records.json_lines import read_lines
from jaxrl.sft import sft
from jaxrl.tools.tinker import states
from jaxrl.train import train
from jaxrl.training.update import Updater
from tests.tools.tinker.serving import client, serving

STEPS, SEED, RANK = 4, 5, 8  # the largest rank there: its adapters are drawn as a run draws them
RUN = {
    "trainer.seed": SEED,
    "trainer.max_training_steps": STEPS,
    "trainer.epochs": 1,
    "trainer.policy.model.lora.rank": RANK,
    "trainer.policy.model.lora.alpha": 32,
    "trainer.policy.model.lora.target_modules": ["all-linear", "lm_head"],
    "trainer.policy.optimizer_config.lr": 3e-3,
    "trainer.policy.optimizer_config.num_warmup_steps": 2,
    "trainer.policy.optimizer_config.max_grad_norm": 0.3,
    "trainer.policy.optimizer_config.weight_decay": 0.1,
    "trainer.eval_before_train": False,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.logger": "console",
    "trainer.run_name": "run",
}


def write_base(folder):
    """Write the tiny model with a head of its own, which a run with adapters can train."""
    shutil.copytree("configs/tiny_char_model", folder)
    about = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(about))
    return str(folder)


def run_config(name, folder, changes):
    changes |= {"trainer.policy.model.path": write_base(folder / "base")}
    places = {f"trainer.{x}_path": str(folder / x) for x in ("ckpt", "export")}
    places["trainer.log_path"] = str(folder)
    config = to_train_config(load_config_file(f"configs/{name}.py"))
    return cfg.apply_overrides(config, RUN | places | changes)


@pytest.fixture
def updates(monkeypatch):
    """Minibatches and weights of all updates that are made, on the host."""
    made, last, gradients, step = [], [], Updater.gradients, Updater.step

    def noted(self, params, minibatch, weights, key):
        last[:] = jax.device_get((minibatch, weights))
        return gradients(self, params, minibatch, weights, key)

    def stepped(self, state, grads):
        made.append(tuple(last))
        return step(self, state, grads)

    monkeypatch.setattr(Updater, "gradients", noted)
    monkeypatch.setattr(Updater, "step", stepped)
    return made


def datum(batch, row, **columns):
    """A row of a batch; what is of a token stands at the place before it."""
    length = int(batch.lengths[row])
    inputs = {name: x[row, 1:length].astype(np.float32) for name, x in columns.items()}
    inputs["target_tokens"] = batch.tokens[row, 1:length].astype(np.int64)
    tokens = batch.tokens[row, : length - 1].tolist()
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def over_the_api(root, seed, loss, minibatches, rates):
    """Make the same updates on a service; return the losses and the adapters."""
    settings = {"trainer__policy__model__path": str(root.parent / "base")}
    with serving(root, trainer__seed=seed, **settings) as server, client(server) as service:
        # the base is the run's: the same folder, drawn from the same seed
        name = server.service.base
        model = service.create_lora_training_client(name, rank=RANK, seed=seed).result()
        found = []
        for data, rate in zip(minibatches, rates, strict=True):
            forward = model.forward_backward(data, loss, None if loss != "ppo" else CLIP)
            adam = {"beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.3}
            model.optim_step(types.AdamParams(learning_rate=rate, **adam)).result()
            found.append(forward.result().metrics["loss:sum"])
        path = model.save_state("end").result().path
        return found, states.read(server.service.file_of(path))[0]["adapters"]


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def compare(found, expected, adapters, trained):
    np.testing.assert_allclose(found, expected, atol=1e-5)
    trained = jax.device_get(trained)
    assert adapters.keys() == trained.keys()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), adapters, trained)
    assert all(np.abs(pair["b"]).max() > 1e-3 for pair in adapters.values())


@pytest.mark.slow  # with the loss of test_tenants.py's formula; the updates are those below
def test_supervised(tmp_path, updates):
    changes = {
        "data.train_data": ["jaxrl.envs.toys.addition:prompts(size=160, split='train')"],
        "data.val_data": [],
        "trainer.train_batch_size": 32,
        "trainer.micro_train_batch_size_per_gpu": 16,
    }
    run = sft(run_config("sft_addition", tmp_path, changes))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    minibatches = [
        [datum(batch, row, weights=weights.policy) for row in range(len(batch.lengths))]
        for batch, weights in updates
    ]
    rates = [line["train/lr"] for line in lines]
    found, adapters = over_the_api(tmp_path / "tinker", SEED, "cross_entropy", minibatches, rates)
    compare(found, [line["train/loss"] for line in lines], adapters, run.state.params)


def test_reinforced(tmp_path, updates):
    changes = {
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=64, length=2)"],
        "data.val_data": [],
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "trainer.update_epochs_per_batch": 2,
        "trainer.policy.optimizer_config.scheduler": "constant",
        "trainer.algorithm.use_entropy_loss": False,
        "trainer.algorithm.use_kl_loss": False,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 5,  # with 3 of a prompt: of one width
    }
    run = train(run_config("quickstart", tmp_path, changes))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    minibatches = []
    for batch, weights in updates:
        # a sum of w min(r A, ...) is one of min(r w A, ...): no weight is below 0
        columns = {"logprobs": batch.old_log_probs, "advantages": batch.advantages * weights.policy}
        minibatches.append([datum(batch, row, **columns) for row in range(len(batch.lengths))])
    rates = [3e-3] * 2 * STEPS
    found, adapters = over_the_api(tmp_path / "tinker", SEED, "ppo", minibatches, rates)
    expected = [line["policy/final_loss"] for line in lines]
    compare(
        np.reshape(found, (STEPS, 2)).mean(axis=1),
        expected,
        adapters,
        run.state.params,
    )
