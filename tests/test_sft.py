"""Supervised runs of the real trainer on the tiny character model, eight host devices."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from jaxrl import config as cfg
from jaxrl.data.conversations import conversation_batch
from jaxrl.files import as_path
from jaxrl.records.checkpoint_folders import checkpoint_steps
from jaxrl.sft import SFTTrainer, build, main, sft
from tests.test_train import ROOT, assert_bitwise_equal, assert_close, assert_trained_alike

RECIPE = str(ROOT / "configs" / "sft_addition.py")
CHAT = [
    ["12+34", "46", "+5", "51"],  # 15 tokens
    ["11+11", "22"],  # 9
    ["7", "8", "9", "10"],  # 9
    ["99+99", "198"],  # 10
]


def write(path, chats):
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(chat)]}
        for chat in chats
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small(folder, **overrides):
    """Four steps of eight conversations of one or two turns, two epochs of 16."""
    folder.mkdir(exist_ok=True)
    settings = {
        "data.train_data": [write(folder / "train.jsonl", CHAT * 4)],
        "data.val_data": [write(folder / "val.jsonl", CHAT[:3])],
        "trainer.epochs": 2,
        "trainer.max_training_steps": None,
        "trainer.train_batch_size": 8,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.eval_interval": 2,
        "trainer.eval_batch_size": 2,
        "trainer.ckpt_interval": 1,
        "trainer.max_ckpts_to_keep": -1,
        "trainer.hf_save_interval": 4,
        "trainer.run_name": "run",
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
    }
    return cfg.apply_overrides(cfg.load_config_file(RECIPE), {**settings, **overrides})


def lines(folder):
    """metrics.jsonl without wall-clock numbers."""
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if "timing" not in name and "per_second" not in name and "compile" not in name
        }
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    return folder, sft(small(folder))


def test_a_run_leaves_what_it_should(whole):
    folder, trainer = whole
    written = lines(folder)
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4]
    assert ["eval/loss" in line for line in written] == [True, False, True, False, True]
    assert written[-1]["eval/loss"] < written[0]["eval/loss"]
    # imitated, with their ends: 46 and 51; 22; 8 and 10
    assert written[0]["eval/trained_tokens"] == (3 + 3) + 3 + (2 + 3)
    assert written[0]["eval/loss"] == pytest.approx(np.log(48), abs=0.2)  # a random model
    assert [line.get("trainer/epoch") for line in written] == [None, 0, 0, 1, 1]
    assert trainer.watch.recompiles == 0
    assert (folder / "run" / "curve.png").stat().st_size > 5_000
    assert (folder / "run" / "config.yaml").is_file()
    names = sorted(path.name for path in (folder / "checkpoints").glob("[!.]*"))
    assert names == [f"global_step_{n}" for n in (1, 2, 3, 4)]


@pytest.mark.slow
def test_conversations_that_begin_alike_share_it_where_asked(whole, tmp_path):
    settings = {
        "trainer.prefix_sharing": "on",
        "trainer.policy.mesh.fsdp": 2,
        "trainer.policy.mesh.tensor": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.eval_interval": -1,
    }
    trainer = sft(small(tmp_path / "trees", **settings))
    written = lines(tmp_path / "trees")
    assert all(line["trainer/prefix_sharing"] > 0.1 for line in written)
    assert trainer.watch.recompiles == 0
    assert_trained_alike(trainer.state, whole[1].state)


def test_the_export_has_the_loss_that_was_evaluated(whole):
    """Cross-entropy of Hugging Face's model, over the imitated tokens of all conversations."""
    import torch

    folder, trainer = whole
    model = AutoModelForCausalLM.from_pretrained(folder / "exports/global_step_4/policy")
    loss, count = 0.0, 0
    for conversation in trainer.eval_data:
        tokens, mask = torch.tensor(conversation.tokens), torch.tensor(conversation.loss_mask)
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        picked = scores[torch.arange(len(tokens) - 1), tokens[1:]]
        loss, count = loss - float((picked * mask[1:]).sum()), count + int(mask.sum())
    assert lines(folder)[-1]["eval/loss"] == pytest.approx(loss / count, rel=1e-4)


def test_every_epoch_visits_every_conversation_once(whole):
    _, trainer = whole
    orders = []
    for first in (1, 3):
        rows = [trainer.next_batch(step) for step in (first, first + 1)]
        texts = [
            bytes(row[:length])
            for b in rows
            for row, length in zip(b.tokens, b.lengths, strict=True)
        ]
        assert sorted(texts) == sorted(
            bytes(np.array(c.tokens, np.int32)[: len(c.tokens)]) for c in trainer.train_data
        )
        orders.append(texts)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.micro_train_batch_size_per_gpu": 8, "trainer.policy.mesh.data": 1},
        pytest.param(
            {
                "trainer.use_sample_packing": True,
                "trainer.packed_length": 48,
                "trainer.policy.mesh.fsdp": 4,
                "trainer.policy.mesh.tensor": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["microbatches", "packed-on-another-mesh"],
)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(whole, tmp_path, settings):
    """The token mean is over the whole batch: through the real update, padded and packed."""
    _, one = whole
    two = build(small(tmp_path, **settings))
    gradients = []
    for trainer in (one, two):
        trainer.state = (
            trainer.updater.offload(trainer.restore_or_init()) if trainer is two else one.state
        )
        batch = conversation_batch(one.train_data[:8])
        weights, _ = trainer.updater.weights(batch)
        params = jax.device_put(
            jax.device_get(one.params),
            jax.tree.map(lambda x: x.sharding, trainer.abstract_state.params),
        )
        gradients.append(trainer.updater.gradients(params, batch, weights, jax.random.key(0))[0])
    assert_close(*gradients)
    # 6 + 3 + 5 + 4 imitated tokens, twice
    np.testing.assert_allclose(weights.policy, batch.loss_mask / 36, rtol=1e-6)


def test_resumed_equals_uninterrupted(whole, tmp_path):
    folder, trainer = whole
    path = str(folder / "checkpoints" / "global_step_1")
    settings = {"trainer.resume_mode": "from_path", "trainer.resume_path": path}
    config = small(folder, **settings)  # the same data files
    config = cfg.apply_overrides(
        config,
        {f"trainer.{name}": str(tmp_path) for name in ("ckpt_path", "export_path", "log_path")},
    )
    resumed = sft(config)
    assert_bitwise_equal(resumed.state, trainer.state)
    assert lines(tmp_path) == lines(folder)[2:]


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(whole, tmp_path):
    folder, trainer = whole
    values = cfg.get_config_as_dict(small(folder))
    for name, part in (("log_path", ""), ("ckpt_path", "checkpoints"), ("export_path", "exports")):
        values["trainer"][name] = str(tmp_path / part)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"def get_config():\n    return {values!r}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl.sft", f"--config={recipe}"],
        cwd=ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "checkpoints" / "global_step_2").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert main([f"--config={recipe}"]) == 0
    assert lines(tmp_path) == lines(folder)
    resumed = build(cfg.load_config_file(str(recipe)))
    assert_bitwise_equal(resumed.restore_or_init(), trainer.state)


@pytest.mark.slow
def test_the_records_of_another_config_are_not_written_over(whole, tmp_path):
    folder, _ = whole
    records = (folder / "run" / "metrics.jsonl").read_bytes()
    other = {"trainer.seed": 7, "trainer.ckpt_path": str(tmp_path / "checkpoints")}
    with pytest.raises(ValueError, match=r"run folder .*trainer.seed': \(42, 7\)"):
        sft(small(folder, **other))
    assert (folder / "run" / "metrics.jsonl").read_bytes() == records


@pytest.mark.slow
def test_adapters_are_trained_alone(tmp_path):
    settings = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.random_init": False}
    base = sft(small(tmp_path / "base"))
    exported = str(tmp_path / "base/exports/global_step_4/policy")
    config = small(tmp_path / "lora", **settings, **{"trainer.policy.model.path": exported})
    trainer = sft(config)
    before = jax.device_get(base.state.params["embed"])
    np.testing.assert_array_equal(jax.device_get(trainer.policy.base["embed"]), before)
    written = lines(tmp_path / "lora")
    assert written[-1]["eval/loss"] < written[0]["eval/loss"]
    folder = tmp_path / "lora/exports/global_step_4/policy"
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sft.overlong": "cut"}, r"sft.overlong='cut': must be 'truncate' or 'drop'"),
        ({"sft.train_on_what": "all"}, r"sft.train_on_what='all': must be 'all_assistant_mess"),
        ({"sft.max_length": 0}, r"sft.max_length=0: must be positive, or None \(any\)"),
        (
            {"trainer.algorithm.policy_loss_type": "gspo"},
            r"policy_loss_type='gspo': has no effect in supervised fine-tuning; leave it 'regular'",
        ),
        ({"generator.n_samples_per_prompt": 2}, r"n_samples_per_prompt=2: has no effect"),
        ({"trainer.algorithm.overlong_buffer": {"len": 2}}, r"overlong_buffer.len=2: has no eff"),
        ({"trainer.train_batch_size": 17}, r"the data, which has 16; trainer.train_batch_size=17"),
        (
            {"trainer.use_sample_packing": True, "trainer.packed_length": 8},
            r"packed_length=8: shorter than the longest conversation of 15 tokens; set it to 15",
        ),
        ({"trainer.max_tokens_per_microbatch": 64}, r"64: less than one row of 16 tokens on each"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_trained(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        build(small(tmp_path, **overrides))


def test_what_follows_from_other_fields_may_be_given(tmp_path):
    """A run's config.yaml is resolved, and is a config again."""
    resolved = cfg.resolve_sft(small(tmp_path))
    cfg.validate_sft(resolved)
    assert cfg.resolve_sft(resolved) == resolved


def test_reinforcement_learning_refuses_the_settings_of_imitation():
    config = cfg.apply_overrides(cfg.TrainConfig(), {"sft.max_length": 7})
    with pytest.raises(ValueError, match=r"sft=\{'max_length': 7\}: .*`python -m jaxrl.sft`"):
        cfg.validate(config)


def test_the_card_and_the_example_say_what_is_imitated(tmp_path, capsys):
    build(small(tmp_path, **{"sft.max_length": 12, "sft.overlong": "drop"}))
    said = capsys.readouterr().out
    assert "12 conversations from" in said
    assert "4 dropped" in said
    assert "cross_entropy: l = -log_probs" in said
    assert "token_mean: w_bt = m_bt / sum m" in said
    assert "at most 12, longer: drop; the longest has 10 tokens" in said
    assert "8 conversations = 1 optimizer update per step" in said
    assert "11+11>[[22<eos>]]" in said


def test_a_quiet_run_says_nothing_of_its_data(tmp_path, capsys):
    build(small(tmp_path, **{"trainer.watching.display": "quiet"}))
    assert capsys.readouterr().out == ""


def test_the_command(tmp_path, capsys):
    assert main(["--help"]) == 0
    assert main([f"--config={RECIPE}", "--config.sft.max_lenth=3"]) == 2
    assert "Did you mean 'sft.max_length'?" in capsys.readouterr().err
    no_data = '--config.data.train_data=["no_such.jsonl"]'  # is found out before the model is read
    path = "--config.trainer.policy.model.path=nobody/has-this-model"
    assert main([f"--config={RECIPE}", no_data, path]) == 2
    assert "error: data file 'no_such.jsonl' does not exist" in capsys.readouterr().err


def test_a_signal_ends_it_after_the_step_and_it_goes_on_with_the_same_bits(
    whole, tmp_path, monkeypatch, capfd
):
    folder, undisturbed = whole
    train_step, settings = SFTTrainer.train_step, {"trainer.ckpt_interval": 2}

    def with_signal(trainer, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, step)

    monkeypatch.setattr(SFTTrainer, "train_step", with_signal)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recipe, config = tmp_path / "recipe.py", small(tmp_path, **settings)
    recipe.write_text(f"def get_config():\n    return {cfg.get_config_as_dict(config)!r}\n")
    assert main([f"--config={recipe}"]) == 143
    line = "SIGTERM: ended after step 3; the same command resumes after step 3"
    assert capfd.readouterr().err.splitlines()[-1] == line
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_DFL  # as the run found it
    monkeypatch.undo()
    saved = checkpoint_steps(as_path("", config.trainer.ckpt_path))
    assert saved == [2, 3]
    resumed = sft(small(tmp_path, **settings))
    assert lines(tmp_path) == lines(folder)
    assert_bitwise_equal(resumed.state, undisturbed.state)
