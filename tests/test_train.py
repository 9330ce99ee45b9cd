"""Whole runs of the real trainer on a tiny model, eight host devices."""

import gc
import inspect
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxrl import config as cfg
from jaxrl.envs import Env
from jaxrl.evaluate import evaluate_subject
from jaxrl.files import sealed, unsealed
from jaxrl.models import RopeScaling
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.train import BasePPOExp, exit_status, main, train
from jaxrl.trainer import Trainer, out_of_collections
from tests.envs.json_server import JsonServer, serving

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


def small(folder, **overrides):
    """The quickstart, cut to four steps of 4 x 4 samples, two minibatches each."""
    settings = {
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=64, seed=0)"],
        "data.val_data": ["jaxrl.envs.toys.sort_digits:prompts(size=8, seed=1)"],
        "trainer.max_training_steps": 4,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.micro_forward_batch_size_per_gpu": 2,
        "generator.n_samples_per_prompt": 4,
        "trainer.policy.optimizer_config.scheduler": "constant",  # of any number of steps
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.entropy_loss_coef": 0.01,
        "trainer.eval_interval": 2,
        "trainer.eval_batch_size": 5,
        "trainer.ckpt_interval": 2,
        "trainer.hf_save_interval": 4,
        "trainer.dump_data_batch": True,
        "trainer.print_example_interval": 4,
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
    }
    return cfg.apply_overrides(cfg.load_config_file(QUICKSTART), {**settings, **overrides})


TIMED = "timing", "per_second", "roofline", "compile", "idle_sec", "qsize"


def metric_lines(folder):
    """metrics.jsonl without wall-clock numbers."""
    lines = (folder / "quickstart" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not any(x in k for x in TIMED)}
        for line in lines
    ]


def assert_bitwise_equal(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(jax.device_get(left), jax.device_get(right))


def assert_trained_alike(a, b):
    """Weights of two states, each by the size of its gradients: Adam divides one that is nothing
    but rounding errors by their own size, and which way such a weight goes is the processor's."""
    second_moments = optax.tree_utils.tree_get(b.opt_state, "nu")
    sizes = jax.tree.map(np.sqrt, jax.device_get(second_moments))
    weighed = [jax.tree.map(np.multiply, jax.device_get(x.params), sizes) for x in (a, b)]
    assert_close(*weighed)


def assert_close(a, b):
    """By the norm of each array."""
    for left, right in zip(*(jax.tree.leaves(jax.device_get(x)) for x in (a, b)), strict=True):
        assert np.linalg.norm(left - right) <= 1e-5 * np.linalg.norm(right)


@pytest.mark.slow  # the conversations below are packed
def test_packed_rows_train_to_the_same_weights(finished, tmp_path):
    folder, padded = finished
    packing = {"trainer.use_sample_packing": True, "trainer.packed_length": 24}
    packed = train(small(tmp_path, **packing))
    assert packed.watch.recompiles == 0
    assert_trained_alike(packed.state, padded.state)
    efficiency = {"trainer/packing_efficiency"}
    for ours, expected in zip(metric_lines(tmp_path), metric_lines(folder), strict=True):
        assert ours.keys() == expected.keys()
        same = {name: x for name, x in ours.items() if name not in efficiency}
        assert same == pytest.approx({name: expected[name] for name in same}, rel=1e-3, abs=1e-5)


@pytest.mark.slow  # a run on two new meshes
def test_a_run_goes_on_in_packed_rows_on_another_mesh_with_a_reference_on_a_third(
    finished, tmp_path
):
    folder, padded = finished  # one trajectory a row, on fsdp 8
    settings = {
        "trainer.policy.mesh.fsdp": 4,
        "trainer.policy.mesh.tensor": 2,
        "trainer.ref.mesh": {"data": 2, "fsdp": 4},
        "trainer.use_sample_packing": True,
        "trainer.resume_mode": "from_path",
        "trainer.resume_path": str(folder / "checkpoints" / "global_step_2"),
        **dict.fromkeys(("trainer.eval_interval", "trainer.hf_save_interval"), -1),
    }
    moved = train(small(tmp_path, **settings))
    sizes = [dict(x.ref_params["embed"].sharding.mesh.shape) for x in (moved, padded)]
    assert [(x["data"], x["fsdp"], x["tensor"]) for x in sizes] == [(2, 4, 1), (1, 8, 1)]
    assert_trained_alike(moved.state, padded.state)
    assert metric_lines(tmp_path)[-1]["policy/policy_kl"] == pytest.approx(
        metric_lines(folder)[-1]["policy/policy_kl"], rel=1e-3
    )


def test_a_run_leaves_what_it_should(finished):
    folder, trainer = finished
    lines = metric_lines(folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all("eval/all/avg_score" in lines[i] for i in (0, 2, 4))
    written = yaml.safe_load((folder / "quickstart" / "config.yaml").read_text())
    assert cfg.to_train_config(written) == trainer.config
    assert (folder / "quickstart" / "curve.png").stat().st_size > 5_000
    assert list((folder / "quickstart" / "tensorboard").glob("events*"))
    evaluations = folder / "exports/dumped_evals/global_step_4_evals/sort_digits.jsonl"
    assert len(evaluations.read_text().splitlines()) == 8
    assert sorted(p.name for p in (folder / "checkpoints").glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]
    assert int(trainer.state.step) == 4
    assert trainer.watch.recompiles == 0


def test_a_checkpoint_evaluated_by_itself_scores_as_in_its_run(finished, tmp_path):
    folder, _ = finished
    subject = f"{folder}/checkpoints/global_step_4"
    results = evaluate_subject(small(folder), subject, output=tmp_path / "out")
    logged = {k: v for k, v in metric_lines(folder)[-1].items() if k.startswith("eval/")}
    assert results["metrics"] == logged
    dumped = folder / "exports/dumped_evals/global_step_4_evals/sort_digits.jsonl"
    assert (tmp_path / "out/sort_digits.jsonl").read_text() == dumped.read_text()
    assert (results["kind"], results["step"], results["policy_versions"]) == ("checkpoint", 4, [4])
    written = json.loads((tmp_path / "out/results.json").read_text())
    assert written == {k: v for k, v in results.items() if k != "folder"}


def test_the_batches_of_a_run_can_be_read(finished):
    folder, trainer = finished
    batch = load_batch(batch_path(folder / "exports", 4))
    line = metric_lines(folder)[-1]
    assert batch.tokens.shape[0] == 16
    assert batch.index.tolist() == [i for i in range(4) for _ in range(4)]
    assert batch.rewards.sum(-1).mean() == pytest.approx(line["loss/avg_final_rewards"])
    difference = np.abs(batch.old_log_probs - batch.rollout_log_probs)[batch.loss_mask > 0]
    name = "policy/rollout_train_logprobs_abs_diff_max"
    assert difference.max() == pytest.approx(line[name])
    assert batch.advantages.shape == batch.ref_log_probs.shape == batch.tokens.shape


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_not_evaluated(finished, tmp_path):
    folder, _ = finished
    source = folder / "checkpoints/global_step_4"
    other = {"trainer.policy.model_config_kwargs": {"rope_theta": 77.0}}
    with pytest.raises(ValueError, match=r"of another model; .*rope_theta.*config of its run"):
        evaluate_subject(small(folder, **other), str(source), output=tmp_path / "out")
    copy = tmp_path / "global_step_4"
    shutil.copytree(source, copy)
    (meta,) = (p for p in (copy / "meta").rglob("*") if "checksums" in p.read_text())
    saved, _ = unsealed(meta.read_text())
    saved["checksums"][next(k for k in saved["checksums"] if k.startswith(".params"))] += 1
    meta.write_text(json.dumps(sealed(saved)))
    with pytest.raises(ValueError, match=r"damaged .*values of \[.*params"):
        evaluate_subject(small(folder), str(copy), output=tmp_path / "out")


def test_sampler_and_trainer_agree_at_every_step(finished):
    for line in metric_lines(finished[0])[1:]:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] <= 1e-5


def test_metrics_are_coherent(finished):
    for line in metric_lines(finished[0])[1:]:
        objective = (
            line["policy/policy_loss"]
            + 0.001 * line["policy/policy_kl"]
            - 0.01 * line["policy/policy_entropy"]
        )
        assert line["policy/final_loss"] == pytest.approx(objective, abs=1e-6)
        assert 0 <= line["reward/avg_raw_reward"] <= 1
        assert line["policy/skipped_updates"] == 0
        assert line["generate/batch_num_seq"] == 16
    # the reference is the policy before its first update
    assert 0 < metric_lines(finished[0])[1]["policy/policy_kl"] < 1e-2


def test_what_is_there_before_the_steps_is_kept_out_of_garbage_collections():
    gc.unfreeze()  # what conftest.py has frozen
    with out_of_collections({}):
        assert gc.get_freeze_count() > 10_000  # the modules alone
        with out_of_collections({}):  # whoever froze first lets go
            pass
        assert gc.get_freeze_count() > 10_000  # others may have freed some of what is held
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_the_export_gives_the_same_logits_in_transformers(finished):
    folder, trainer = finished
    path = folder / "exports" / "global_step_4" / "policy"
    base = json.loads((ROOT / "configs/tiny_char_model/config.json").read_text())
    assert json.loads((path / "config.json").read_text()) == base  # 256 positions, and its ends
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3142"}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == "3142>"
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits
    from jaxrl.models.transformer import forward, unembed

    ids = jnp.asarray([tokens])
    positions = jnp.arange(len(tokens))[None]
    params = jax.device_get(trainer.state.params)
    hidden = forward(trainer.model, params, ids, positions, jnp.ones_like(ids))
    ours = unembed(trainer.model, params, hidden)
    # in float32, as random weights are exported; a bfloat16 checkpoint's would be rounded
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)


class PenaltyTrainer(Trainer):
    """The guide's CustomTrainer: a reward penalty, then the library's own work."""

    def postprocess_generator_output(self, output, uids):
        output["rewards"] = [[r - 0.3 for r in row] for row in output["rewards"]]
        return super().postprocess_generator_output(output, uids)


class PenaltyExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return PenaltyTrainer(*args, **kwargs)


def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    """The loss of SkyRL's guide: a number, and a plain float."""
    loss = (-log_probs * advantages).mean()
    return loss, 0.0


def simple_baseline(**kwargs):
    """An estimator that takes everything by keyword, as the guide's `another_estimator`."""
    scores = (kwargs["token_level_rewards"] * kwargs["response_mask"]).sum(-1, keepdims=True)
    advantages = (scores - scores.mean()) * kwargs["response_mask"]
    return advantages, advantages


def test_custom_trainer_loss_and_estimator(tmp_path):
    config = small(
        tmp_path,
        **{
            "trainer.max_training_steps": 1,
            "trainer.algorithm.policy_loss_type": "tests.test_train:reinforce",
            "trainer.algorithm.advantage_estimator": "tests.test_train:simple_baseline",
            "generator.sampling_params.max_generate_length": 3,  # with 5 of a prompt: of one width
        },
    )
    trainer = PenaltyExp(config).run()
    assert type(trainer) is PenaltyTrainer
    line = metric_lines(tmp_path)[-1]
    assert line["policy/grad_norm"] > 0
    assert line["reward/avg_raw_reward"] < 0  # about 0.02 a token before the penalty of 0.3 each
    assert line["loss/avg_final_rewards"] == pytest.approx(line["reward/avg_raw_reward"])


def test_train_takes_any_form_of_config(tmp_path):
    values = cfg.get_config_as_dict(small(tmp_path, **{"trainer.max_training_steps": 1}))
    assert int(train(values).state.step) == 1
    given = [BasePPOExp(kind(values)).config for kind in (ml_collections.ConfigDict, dict)]
    assert given == [BasePPOExp(cfg.to_train_config(values)).config] * 2


def test_a_truncated_response_can_lose_its_reward_and_its_loss(tmp_path):
    config = small(
        tmp_path,
        **{
            "trainer.max_training_steps": 1,
            "generator.sampling_params.max_generate_length": 1,
            "generator.zero_reward_on_non_stop": True,
            "generator.apply_overlong_filtering": True,
        },
    )
    trainer = train(config)
    line = metric_lines(tmp_path)[-1]
    assert line["generate/stop_ratio"] < 1
    assert line["loss/avg_final_rewards"] == 0
    assert int(trainer.state.step) == 1


class BrokenEnv(Env):
    """Raises in the second step, once, and always from the third on. It is tried once before."""

    steps = 0

    def step(self, action):
        BrokenEnv.steps += 1
        once, always = 1 + 16 + 5, 1 + 2 * 16 + 8  # an evaluation has 8 answers
        if BrokenEnv.steps == once or BrokenEnv.steps > always:
            raise KeyError("ground_truth")
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


def plain_prompts(size):
    """Prompts that leave the environment to the config."""
    for i in range(size):
        yield {"prompt": [{"role": "user", "content": str(1000 + i)}]}


def test_an_environment_that_raises_costs_a_trajectory_and_only_if_it_always_does_the_run(
    tmp_path, capsys
):
    config = small(
        tmp_path,
        **{
            "data.train_data": ["tests.test_train:plain_prompts(size=64)"],
            "data.val_data": ["tests.test_train:plain_prompts(size=8)"],
            "environment.env_class": "tests.test_train:BrokenEnv",
            "trainer.eval_before_train": False,
        },
    )
    assert exit_status(BasePPOExp, config) == 2
    (error,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    raised_at = inspect.getsourcelines(BrokenEnv.step)[1] + 4
    message = (
        r"all 16 trajectories of the batch failed; .*BrokenEnv' failed on prompt 0:\d+.*KeyErr"
        rf".*\({re.escape(__file__)}:{raised_at}\)$"
    )
    assert re.search(message, error)
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["generate/env_errors"] for line in lines] == [0, 1]
    assert [line["reward/avg_raw_reward"] for line in lines] == [1, 15 / 16]
    assert (tmp_path / "checkpoints" / "global_step_2").exists()


GUESS = str(ROOT / "configs" / "guess_number.py")


@pytest.mark.parametrize("step_wise", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_conversations_of_several_turns(tmp_path, step_wise):
    changes = {
        "data.train_data": ["jaxrl.envs.toys.guess_number:prompts(size=16, seed=0)"],
        "data.val_data": ["jaxrl.envs.toys.guess_number:prompts(size=4, seed=1)"],
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 1,  # row, which holds several conversations
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "generator.n_samples_per_prompt": 4,
        "generator.max_turns": 2,
        "generator.max_input_length": 26,  # 13 of the prompt, a guess of 2, its end, "a number?>"
        "generator.step_wise_trajectories": step_wise,
        # the trainer scores over the tokens that the filters left, or it would not agree below
        "generator.sampling_params.top_k": 5,
        "generator.sampling_params.top_p": 0.8,
        "generator.sampling_params.keep_sampling_mask": True,
        "trainer.use_sample_packing": True,
        "trainer.packed_length": 56,
        "trainer.ckpt_interval": -1,
        "trainer.log_path": str(tmp_path),
        "trainer.ckpt_path": str(tmp_path / "checkpoints"),
        "trainer.export_path": str(tmp_path / "exports"),
        "trainer.run_name": "quickstart",
    }
    train(cfg.apply_overrides(cfg.load_config_file(GUESS), changes))
    first, *lines = metric_lines(tmp_path)
    assert 0 <= first["eval/all/avg_score"] <= 1
    for line in lines:
        assert 1.5 < line["generate/avg_turns"] <= line["generate/max_turns"] == 2
        turns = line["generate/avg_turns"] * 16  # hardly a guess is right at first
        assert line["generate/batch_num_seq"] == (turns if step_wise else 16)
        assert line["environment/guesses"] == line["generate/avg_turns"]
        assert line["policy/grad_norm"] > 0
        # the trainer's log-probs of whole conversations are those that they were sampled with
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
        assert line["policy/policy_entropy"] < np.log(5)


def test_the_command_line(tmp_path, capsys):
    assert main(["--help"]) == 0
    assert "--config=" in capsys.readouterr().out
    assert main([f"--config={QUICKSTART}", "--config.trainer.sed=1"]) == 2
    assert "trainer.seed" in capsys.readouterr().err
    assert main([f"--config={QUICKSTART}", "--config.trainer.train_batch_size=33"]) == 2
    assert "33" in capsys.readouterr().err
    no_data = '--config.data.val_data=["no_such.jsonl"]'  # is found out before the model is read
    path = "--config.trainer.policy.model.path=nobody/has-this-model"
    runs = f"--config.trainer.log_path={tmp_path / 'runs'}"
    assert main([f"--config={QUICKSTART}", no_data, path, runs]) == 2
    assert "error: data file 'no_such.jsonl' does not exist" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["--config=configs/no_such_file.py"]) == 2
    assert "no_such_file" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["log_path", "ckpt_path", "export_path"])
def test_a_folder_that_cannot_be_written_stops_the_run_before_it_starts(tmp_path, capsys, field):
    (tmp_path / "file").write_text("a file where a folder should be")
    folders = {name: f"{tmp_path}/{name}" for name in ("log_path", "ckpt_path", "export_path")}
    folders[field] = f"{tmp_path}/file"
    arguments = [f"--config.trainer.{name}={path}" for name, path in folders.items()]
    assert main([f"--config={QUICKSTART}", *arguments]) == 2
    assert f"error: trainer.{field}='{tmp_path}/file" in capsys.readouterr().err


def test_model_overrides_reach_policy_reference_and_engine(tmp_path):
    changes = {
        "trainer.rope_theta": 5e3,
        "trainer.rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "trainer.policy.model_config_kwargs": {"rms_norm_eps": 1e-5},
    }
    trainer = BasePPOExp(small(tmp_path, **changes)).build()
    assert (trainer.model.rope_theta, trainer.model.rms_norm_eps) == (5e3, 1e-5)
    assert trainer.model.rope_scaling == RopeScaling("linear", 2.0)
    assert trainer.engine.programs.config == trainer.model
    trainer.load_reference()  # refuses another architecture
    assert trainer.ref_params is not None
    wrong = {"trainer.policy.model_config_kwargs": {"rms_norm_ep": 1e-5}}
    with pytest.raises(ValueError, match="no field 'rms_norm_ep'; did you mean 'rms_norm_eps'"):
        BasePPOExp(small(tmp_path, **wrong)).build()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quickstart_learns(tmp_path, seed):
    config = cfg.apply_overrides(
        cfg.load_config_file(QUICKSTART),
        {
            "trainer.seed": seed,
            "trainer.log_path": str(tmp_path),
            "trainer.ckpt_path": str(tmp_path / "checkpoints"),
            "trainer.export_path": str(tmp_path / "exports"),
        },
    )
    train(config)
    assert metric_lines(tmp_path)[-1]["eval/all/avg_score"] >= 0.9


def breaks_later(log_probs, old_log_probs, advantages, config):
    """Right for the batch on which it is tried, of rows of 16 + 6 tokens, and NaN for others."""
    tried = log_probs.shape[1] == 22
    return -log_probs * advantages * (1.0 if tried else jnp.nan), {}


@pytest.mark.slow
def test_a_run_that_learns_nothing_does_not_end_well(tmp_path, capsys):
    changes = {
        "trainer.algorithm.policy_loss_type": "tests.test_train:breaks_later",
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": -1,
    }
    assert exit_status(BasePPOExp, small(tmp_path, **changes)) == 2
    error = capsys.readouterr().err
    assert "error: nothing was learnt: all 4 updates of this run were skipped" in error
    assert (tmp_path / "checkpoints" / "global_step_2").exists()  # what there is to look at


def test_a_run_out_of_memory_says_what_to_lower(tmp_path, capsys):
    class Greedy(BasePPOExp):
        def train(self, trainer):
            jax.block_until_ready(jnp.zeros((1 << 24, 1 << 24)))  # 2^50 bytes

    assert exit_status(Greedy, small(tmp_path)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "no memory left" in line and "1125899906842624" in line
    assert "Lower trainer.micro_train_batch_size_per_gpu" in line


def test_memory_that_runs_out_later_is_a_crash(tmp_path, monkeypatch):
    finished = Trainer.train_step

    def second_fails(self, *args, **kwargs):
        if self.updates:
            raise jax.errors.JaxRuntimeError("INTERNAL: RESOURCE_EXHAUSTED while it ran")
        return finished(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", second_fails)
    assert exit_status(BasePPOExp, small(tmp_path)) == 70


def test_an_environment_that_judges_no_row_is_warned_of(tmp_path, capsys):
    changes = {"environment.env_class": "calculator", "trainer.max_training_steps": 1}
    train(small(tmp_path, **changes))
    assert (
        "environment.env_class='calculator' judges no row: all 72 name 'sort_digits' in their "
        "column env_class" in " ".join(capsys.readouterr().err.split())
    )


def test_the_key_of_a_judge_is_in_no_record(tmp_path, monkeypatch, capfd):
    """Nor in what is printed, though the server repeats it in its errors."""
    key = "hunter2 of the judge"
    monkeypatch.setenv("MY_VARIABLE", key)  # a name that does not tell
    monkeypatch.setattr("jaxrl.envs.json_request.FIRST_WAIT", 0.001)
    said = {"choices": [{"message": {"content": "### Final Score: 1"}}]}
    row = {"prompt": "12>", "env_class": "llm_as_a_judge", "judge_prompt": "Rate {response}"}
    with serving(JsonServer(lambda question: said)) as server:
        config = small(
            tmp_path,
            **{
                "data.train_data": [row] * 8,
                "data.val_data": [],
                "trainer.max_training_steps": 1,
                "environment.skyrl_gym.llm_as_a_judge.base_url": server.url,
                "environment.skyrl_gym.llm_as_a_judge.api_key_env": "MY_VARIABLE",
                "environment.skyrl_gym.llm_as_a_judge.max_attempts": 1,
            },
        )
        server.answer = lambda question: (
            said if len(server.keys) % 3 else {"error": f"Incorrect key: {server.keys[-1]}"}
        )
        train(config)
    assert set(server.keys) == {f"Bearer {key}"}
    assert metric_lines(tmp_path)[-1]["generate/env_errors"] > 0
    shown = "".join(capfd.readouterr())
    assert "Incorrect key: Bearer <hidden>" in shown
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in written)
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    assert "hunter2" not in shown
