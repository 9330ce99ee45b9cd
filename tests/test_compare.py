"""Losses and estimators on one recorded minibatch, against gradients that are written out here."""

import contextlib
import copy
import json
import re
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.compare import as_json, compare, heat_map, main, table
from jaxrl.data.packing import one_per_row
from jaxrl.records.ledger.database import SEALED
from jaxrl.records.sealed_tables import seal
from jaxrl.tools.compare.loss_comparison import (
    Comparison,
    Evaluated,
    OtherRuns,
    compare_variants,
    cosines,
    measured_kl,
    weight_ess,
)
from jaxrl.tools.compare.table import neighbours
from jaxrl.tools.compare.variants import Variant, parse_variants
from jaxrl.tools.replay.recorded_run import RecordedRun, restored
from jaxrl.train import train
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import TrainBatch
from tests.test_resume import ACTOR_CRITIC
from tests.test_train import small

PURE = "+use_kl_loss=false+use_entropy_loss=false"
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.25, 0.5, 0.75)


def negative_regular(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """The default loss, with the sign of every advantage turned round after its minimum."""
    ratio = jnp.exp((log_probs - old_log_probs) * loss_mask)
    clipped = jnp.clip(ratio, 1 - config.eps_clip_low, 1 + config.eps_clip_high)
    return jnp.minimum(ratio * advantages, clipped * advantages), {}


NEGATIVE = "tests.test_compare:negative_regular"


def other_runs(trainer, rollouts):
    """Make the runs of other objectives from the state and the parts of a trainer."""

    def make_batch(**parts):
        other = copy.copy(trainer)
        vars(other).update(parts, metrics={})
        output = other.postprocess_generator_output({**rollouts[0]}, rollouts[1])
        return other.add_advantages(other.add_log_probs(other.collate(output)))

    return OtherRuns(
        make_batch,
        config=trainer.config,
        state=trainer.state,
        policy=trainer.policy,
        forward_pass=trainer.forward_pass,
        ref_forward_pass=trainer.ref_forward_pass,
        reference=trainer.reference,
        ref_params=trainer.ref_params,
        updater=trainer.updater,
        total_steps=trainer.total_steps,
    )


@pytest.fixture(scope="module")
def compared(finished):
    """Step 4 of the session's run, its second minibatch, with rewards that differ in each group.

    The trainer as it is before that minibatch; the batch, its log-probs before the step; the state
    before the step and its rollouts; what came out.
    """
    run = RecordedRun(finished[0] / "quickstart")
    output, uids = run.rollouts(4)
    output["rewards"] = list(REWARDS)
    with restored(run, run.find_checkpoint(4)) as trainer:
        trainer.train_step(3)
        batch = trainer.collate(trainer.postprocess_generator_output({**output}, uids))
        old, _ = trainer.forward_pass(trainer.params, batch)
        variants = parse_variants(trainer.config, f"regular{PURE},{NEGATIVE}{PURE}", "grpo,rloo")
        before = jax.tree.map(jnp.copy, trainer.state)
        runs = other_runs(trainer, (output, uids))
        found = compare_variants(runs, uids, variants, step=4, minibatch=2)
        trainer.state = runs.state
        yield trainer, batch, old, (before, (output, uids)), found


@pytest.mark.slow
def test_a_loss_is_like_itself_and_unlike_its_negative(compared):
    found = compared[-1]
    regular, _, negative, _ = found.choices
    assert (regular.name, negative.name) == (f"regular{PURE} | grpo", f"{NEGATIVE}{PURE} | grpo")
    assert found.cosine[0, 0] == pytest.approx(1, abs=1e-12)
    assert found.cosine[0, 2] == pytest.approx(-1, abs=1e-6)
    np.testing.assert_array_equal(found.cosine, found.cosine.T)
    assert regular.grad_norm == pytest.approx(negative.grad_norm, rel=1e-5)
    assert regular.loss == pytest.approx(-negative.loss, rel=1e-4)
    # a step against the gradient and one along it: the same distance, to second order
    assert regular.kl_of_length == pytest.approx(negative.kl_of_length, rel=0.2)
    assert regular.clip_fraction is not None and negative.clip_fraction is None
    assert 0.5 < regular.effective_sample_size < 1  # the policy has moved since the step began
    assert found.ratios["ratio_max"] > 1.05


def advantages_of(estimator):
    """Of the rewards of four groups of four, as the two papers have it."""
    rewards = np.reshape(REWARDS, (4, 4))
    mean, total = rewards.mean(1, keepdims=True), rewards.sum(1, keepdims=True)
    if estimator == "grpo":
        return ((rewards - mean) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    return (rewards - (total - rewards) / 3).ravel()


def test_cosine_and_norms_are_those_of_a_gradient_that_is_written_out(compared):
    trainer, batch, old, _, found = compared
    half = jax.tree.map(lambda x: np.asarray(x)[8:], batch)
    rows = one_per_row(half.tokens, half.lengths, half.loss_mask)
    options = {"temperature": 1.0, "dtype": jnp.float32, "remat": "none", "with_entropy": False}

    @jax.jit
    @jax.value_and_grad
    def clipped_surrogate(params, advantages):
        log_probs, _ = log_probs_and_entropy(trainer.model, params, rows, **options)
        ratio = jnp.exp(log_probs - old[8:])
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -(gain * half.loss_mask).sum() / half.loss_mask.sum()

    direct = []
    for choice, estimator in zip(found.choices, ("grpo", "rloo"), strict=False):
        params, advantages = jax.device_get(trainer.params), advantages_of(estimator)[8:, None]
        loss, gradient = clipped_surrogate(params, advantages)
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)]).astype(np.float64)
        assert choice.loss == pytest.approx(float(loss), rel=1e-4)
        assert choice.grad_norm == pytest.approx(np.linalg.norm(flat), rel=1e-4)
        direct.append(flat / np.linalg.norm(flat))
    cosine = float(direct[0] @ direct[1])
    assert cosine < 0.999  # the estimators weigh the groups otherwise
    assert found.cosine[0, 1] == pytest.approx(cosine, abs=1e-5)


def test_cosines_of_all_parameters_as_one_vector():
    a = {"x": np.array([[3.0, 0.0]]), "y": np.array([4.0])}
    b = {"x": np.array([[4.0, 0.0]]), "y": np.array([3.0])}
    zero = jax.tree.map(np.zeros_like, a)
    # (3 * 4 + 4 * 3) / (5 * 5) = 0.96
    nan = np.nan
    expected = [[1, 0.96, nan], [0.96, 1, nan], [nan, nan, nan]]
    np.testing.assert_allclose(cosines([a, b, zero]), expected)


def two_tokens(**fields):
    """A row of three places, two of them sampled."""
    return TrainBatch(
        **dict.fromkeys(("tokens", "lengths", "response_mask", "rewards", "index"), 0),
        **dict.fromkeys(("rollout_log_probs", "policy_versions", "row_ids"), 0),
        loss_mask=np.array([[0.0, 1.0, 1.0]]),
        **fields,
    )


def test_the_effective_sample_size_is_of_the_weights_that_tokens_get():
    minibatch = two_tokens(advantages=np.array([[9.0, 2.0, -1.0]]))
    slopes = np.array([[9.0, -6.0, 1.0]])
    weights = SimpleNamespace(kl=np.ones((1, 3)), replace=lambda **changes: changes)

    def cotangents(log_probs, entropy, batch, weights, key):
        assert not weights["kl"].any()
        return (slopes, None), None

    objective = SimpleNamespace(seen=lambda minibatch: minibatch)
    updater = SimpleNamespace(cotangents=cotangents, objective=objective, options={})
    found = weight_ess(updater, (None, None), minibatch, weights, 0)
    # weights 6 / 2 = 3 and 1 / 1 = 1: (3 + 1)^2 / (2 (9 + 1))
    assert found == pytest.approx(16 / 20)
    nothing = two_tokens(advantages=np.zeros((1, 3)))
    assert weight_ess(updater, (None, None), nothing, weights, 0) is None


def test_the_measured_kl_is_a_mean_over_sampled_tokens():
    before = (np.log(np.array([[0.1, 0.5, 0.2]])),)
    after = (np.log(np.array([[0.9, 0.25, 0.2]])),)
    # r = 0.5: 0.5 - 1 + log 2 = 0.193147; r = 1: 0
    assert measured_kl(before, after, two_tokens()) == pytest.approx(0.193147 / 2, abs=1e-6)


def test_choices_are_read_with_their_changes():
    config = cfg.resolve(small(Path("/tmp")))
    names = "regular+eps_clip_high=2.8e-1+loss_reduction=sequence_mean, gspo"
    first, *_, last = parse_variants(config, names, "rloo,reinforce+++gamma=0.9")
    assert first.name == "regular+eps_clip_high=2.8e-1+loss_reduction=sequence_mean | rloo"
    algorithm = first.config.trainer.algorithm
    assert (algorithm.eps_clip_high, algorithm.loss_reduction) == (0.28, "sequence_mean")
    assert (algorithm.eps_clip_low, algorithm.advantage_estimator) == (0.2, "rloo")
    assert last.config.trainer.algorithm.advantage_estimator == "reinforce++"
    assert last.config.trainer.algorithm.gamma == 0.9
    (own,) = parse_variants(config, "regular", None)
    assert own == Variant("regular", config)
    named = parse_variants(config, {"mine": ("gspo", "rloo"), "own": ("regular", "grpo")}, None)
    assert [x.name for x in named] == ["mine", "own"]
    assert named[0].config.trainer.algorithm.policy_loss_type == "gspo"
    assert [x.config.trainer.algorithm.advantage_estimator for x in named] == ["rloo", "grpo"]
    for losses, message in {
        "regular,": "--losses='regular,' has an empty name",
        "reglar": "reglar: trainer.algorithm.policy_loss_type='reglar'.*regular",
        "regular+eps_clip=1": "unknown.*eps_clip",
        "gmpo": "gmpo: trainer.algorithm.loss_reduction='token_mean'.*sequence_mean",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_variants(config, losses, None)


def test_a_table_has_a_dash_where_there_is_no_number():
    one = Evaluated("regular", -0.5, 2.0, 0.25, 0.9, 1e-3, None)
    none = Evaluated("mine", 0.0, 0.0, None, None, 0.0, None)
    found = Comparison([one, none], np.array([[1, np.nan], [np.nan, np.nan]]), 7, {}, 0.1)
    assert table(found).splitlines() == [
        "         loss  grad norm  clip  ESS  KL update  KL length",
        "regular  -0.5          2  0.25  0.9      0.001          -",
        "mine        0          0     -    -          0          -",
        "",
        "cosine           1  2",
        "1 regular  +1.0000  -",
        "2 mine           -  -",
    ]
    assert as_json(found)["cosine"] == [[1, None], [None, None]]


def test_the_command_writes_table_numbers_and_picture(finished, tmp_path, capsys):
    run, out = str(finished[0] / "quickstart"), tmp_path / "found.json"
    picture = tmp_path / "found.png"
    options = ["--step=3", "--losses=regular", f"--json={out}", f"--plot={picture}"]
    assert main([run, *options]) == 0
    text = capsys.readouterr().out
    start = f"step 2: {finished[0] / 'checkpoints' / 'global_step_2'}"
    assert f"{start}\n{run}, step 3, minibatch 2: " in text  # the last
    assert "ratio to the old policy 1 to 1" not in text
    (choice,) = json.loads(out.read_text())["choices"]
    assert choice["grad_norm"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([run, "--step=3", "--losses=regular", "--minibatch=1"]) == 0
    assert "1 to 1, KL 0; effective" in (text := capsys.readouterr().out)
    assert "where all ratios are 1 losses that differ in what they do with them are alike" in text
    assert main([run, "--step=3", "--losses=regular", "--minibatch=3"]) == 2
    assert "--minibatch=3: step 3 has 1 to 2; take one" in capsys.readouterr().err


def test_what_makes_no_sense_is_said_before_anything_is_restored(
    finished, tmp_path, capsys, monkeypatch
):
    def restored_too_early(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("jaxrl.tools.compare.table.restored", restored_too_early)
    run, missing = str(finished[0] / "quickstart"), tmp_path / "missing"
    for option, message in {
        "--step=9": "step 9 is not in",
        "--step=0": "step 0 is not in",
        "--losses=reglar": "reglar: trainer.algorithm.policy_loss_type='reglar'",
        "--estimators=rlo": "trainer.algorithm.advantage_estimator='rlo'",
        "--minibatch=0": "--minibatch=0: step 3 has 1 to 2; take one",
        "--minibatch=3": "--minibatch=3: step 3 has 1 to 2; take one",
        "--device-count=0": "--device-count=0: there is at least 1",
        f"--json={missing}/x.json": f"--json={missing}/x.json: {missing} is not a folder",
        f"--json={tmp_path}": f"--json={tmp_path} is a folder; add the name of a file",
        f"--plot={missing}/x.png": f"--plot={missing}/x.png: {missing} is not a folder",
        f"--plot={tmp_path}/x": f"--plot={tmp_path}/x: its name must end in one of .",
    }.items():
        assert main([run, "--step=3", "--losses=regular", option]) == 2
        assert message in capsys.readouterr().err


def test_gradients_that_point_the_same_way_are_neighbours():
    angles = np.deg2rad([0.0, 178.0, 91.0, 3.0, 180.0, 88.0])
    vectors = np.stack([np.cos(angles), np.sin(angles)])
    assert neighbours(vectors.T @ vectors) in ([0, 3, 5, 2, 1, 4], [4, 1, 2, 5, 3, 0])
    lone = np.full((3, 3), np.nan)  # the second is 0
    lone[np.ix_([0, 2], [0, 2])] = 1
    assert sorted(neighbours(lone)) == [0, 1, 2]
    assert abs(neighbours(lone).index(0) - neighbours(lone).index(2)) == 1
    assert neighbours(np.eye(2)) == [0, 1] and neighbours(np.eye(0)) == []


def test_a_picture_has_the_choices_in_the_order_of_neighbours(tmp_path):
    choices = [Evaluated(name, -0.5, 2.0, 0.25, 0.9, 1e-3, None) for name in "abc"]
    cosine = np.array([[1.0, 0.0, 0.9], [0.0, 1.0, 0.1], [0.9, 0.1, 1.0]])
    heat_map(Comparison(choices, cosine, 7, {}, 0.1), tmp_path / "x.svg", "a title")
    drawn = re.findall(r"<!-- (a|b|c|-?[\d.]+) -->", (tmp_path / "x.svg").read_text())
    names = [x for x in drawn if x in "abc"]
    assert names[:3] == names[3:] and names[:3] in (["a", "c", "b"], ["b", "c", "a"])
    cells = [float(x) for x in drawn if re.fullmatch(r"\d\.\d\d", x)][:9]
    order = ["abc".index(name) for name in names[:3]]
    assert cells == cosine[np.ix_(order, order)].ravel().tolist()


def test_a_picture_of_many_choices_has_no_numbers(tmp_path):
    one = Evaluated("regular", -0.5, 2.0, 0.25, 0.9, 1e-3, None)
    for count, shown in {16: 16 * 16, 17: 0}.items():
        found = Comparison([one] * count, np.full((count, count), 0.5), 7, {}, 0.1)
        heat_map(found, tmp_path / "x.svg", "a title")
        texts = re.findall(r"<!-- 0\.50 -->", (tmp_path / "x.svg").read_text())
        assert len(texts) - shown in (0, 1)  # the colour bar may have one


def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path):
    one = Evaluated("regular", -0.5, 2.0, 0.25, 0.9, 1e-3, None)
    heat_map(Comparison([one], np.eye(1), 7, {}, 0.1), tmp_path / "x.svg", "a title")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_the_coefficient_of_the_kl_in_the_rewards_is_that_of_the_choice(compared):
    trainer, _, _, (_, rollouts), _ = compared
    kl = {"use_kl_in_reward": True, "use_kl_loss": False, "kl_loss_coef": 0.0625}
    changes = {f"trainer.algorithm.{name}": value for name, value in kl.items()}
    penalized = copy.copy(trainer)
    penalized.config = cfg.apply_overrides(trainer.config, changes)
    penalized.state = trainer.state.replace(kl_coef=np.float32(0.25))  # as a controller left it
    changes["trainer.algorithm.kl_loss_coef"] = 0.125
    other = cfg.apply_overrides(trainer.config, changes)
    runs = other_runs(penalized, rollouts)
    raw = np.asarray(other_runs(trainer, rollouts).batch(trainer.config).rewards)
    own, others = (raw - runs.batch(config).rewards for config in (penalized.config, other))
    assert np.abs(own).max() > 1e-3
    np.testing.assert_allclose(others, own * 0.125 / 0.25, rtol=1e-3, atol=1e-6)


def test_the_minibatch_is_described_whatever_the_losses(compared):
    """Of one that has no use for the log-probs before the step, too."""
    trainer, batch, old, (before, rollouts), found = compared
    other = copy.copy(trainer)
    other.state = before
    variants = parse_variants(trainer.config, f"rollout_is{PURE}", None)
    runs = other_runs(other, rollouts)
    ratios = compare_variants(runs, rollouts[1], variants, step=4, minibatch=2).ratios
    assert ratios == pytest.approx(found.ratios, rel=1e-5)
    now, _ = trainer.forward_pass(trainer.params, batch)
    ratio = np.exp(now - old)[8:][np.asarray(batch.loss_mask)[8:] > 0]
    assert ratios["ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert ratios["ratio_min"] == pytest.approx(ratio.min(), rel=1e-5)


def test_a_choice_that_leaves_no_token_is_named(compared):
    trainer, _, _, (_, (output, uids)), _ = compared
    same = {**output, "rewards": [0.5] * 16}
    variants = parse_variants(trainer.config, "regular,regular+zero_variance_filter=true", None)
    message = r"minibatch 2 of step 4 has no sampled token that counts for regular\+zero_variance"
    runs = other_runs(trainer, (same, uids))
    with pytest.raises(ValueError, match=message):
        compare_variants(runs, uids, variants, step=4, minibatch=2)


def test_a_state_that_is_not_the_recorded_one_is_said(finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished[0] / "quickstart", run)
    numbers = RecordedRun(run).steps[2].checksums
    numbers["state.kl_coef"] += 1
    with contextlib.closing(sqlite3.connect(run / "run.db")) as db, db:
        seal(db, SEALED)
        db.execute("UPDATE steps SET checksums = ? WHERE step = 2", [json.dumps(numbers)])
    nothing = Comparison([], np.eye(0), 0, {}, 0.0)
    replaced = "jaxrl.tools.compare.table.compare_variants"
    monkeypatch.setattr(replaced, lambda *args, **kwargs: nothing)
    start, different = compare(run, 3, "regular").notes
    assert start.startswith("step 2: ") and start.endswith("checkpoints/global_step_2")
    assert different.startswith("step 2: state.kl_coef differs first (the update); 1 of ")


@pytest.mark.slow
def test_norms_do_not_depend_on_microbatches_or_packing(tmp_path):
    """16 rows of a minibatch on 8 devices: two microbatches, or one, or packed ones."""
    whole = {"trainer.policy_mini_batch_size": 4, "trainer.algorithm.advantage_estimator": "grpo"}
    run = RecordedRun(train(small(tmp_path, **whole)).ledger.folder)
    output, uids = run.rollouts(4)
    output["rewards"] = list(REWARDS)
    cuts = [
        {},
        {"trainer.micro_train_batch_size_per_gpu": 2},
        {"trainer.use_sample_packing": True, "trainer.packed_length": 24},
    ]
    for loss in ("regular", "gspo", "kl_cov"):
        with restored(run, run.find_checkpoint(4)) as trainer:
            trainer.train_step(3)
            (variant,) = parse_variants(trainer.config, loss, None)
            variants = [
                Variant(str(number), cfg.apply_overrides(variant.config, cut))
                for number, cut in enumerate(cuts)
            ]
            found = compare_variants(other_runs(trainer, (output, uids)), uids, variants, step=4)
        np.testing.assert_allclose(found.cosine, 1, rtol=0, atol=1e-6)
        norms = [choice.grad_norm for choice in found.choices]
        np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "estimators"),
    [
        ({"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.dropout": 0.2}, "grpo"),
        (ACTOR_CRITIC | {"trainer.epochs": 2, "trainer.max_ckpts_to_keep": -1}, "gae,grpo"),
    ],
)
def test_adapters_critics_and_a_reference_that_the_run_did_not_need(tmp_path, settings, estimators):
    off = {"trainer.algorithm.use_kl_loss": False, "trainer.update_ref_every_epoch": False}
    run = train(small(tmp_path, **{**settings, **off})).ledger.folder
    found = compare(run, 3, "regular,regular+use_kl_loss=true+kl_loss_coef=10", estimators)
    assert np.isfinite(found.cosine).all()
    assert all(choice.grad_norm > 0 and choice.kl_of_update > 0 for choice in found.choices)
    assert found.cosine[0, -1] < 0.999  # the reference pulls
