"""Ids that the tokenizer has not: never drawn, of probability 0 everywhere, without a gradient."""

import dataclasses
import functools
import json
import shutil
import sqlite3

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.array_ops import FILTERED
from jaxrl.data.packing import one_per_row
from jaxrl.files import unsealed, unsealed_text
from jaxrl.losses.distillation import generalized_jsd
from jaxrl.models import hf, init_params, save_pretrained, unembed
from jaxrl.models.architecture import with_known_ids
from jaxrl.models.transformer import describe
from jaxrl.parallel import Placement, make_mesh
from jaxrl.records.checkpoint import recorded_settings
from jaxrl.rollout.build_remote import worker_config
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.recompute import RecomputeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.server import build as serve
from jaxrl.tools.tinker import build as tinker
from jaxrl.train import BasePPOExp, train
from jaxrl.training.forward import Head, log_probs_and_entropy
from jaxrl.training.reference import reference_model
from tests.models import test_exact as exact
from tests.rollout.test_native import LLAMA, flat, random_params
from tests.test_train import ROOT, assert_bitwise_equal, metric_lines, small
from tests.test_wrong_inputs import changed_json
from tests.training.test_forward import (
    CAPPED,
    SPLIT,
    TEMPERATURE,
    TIED,
    WIDE,
    drawn,
    weighted,
    whole,
)

TINY = ROOT / "configs" / "tiny_char_model"
KNOWN = 30  # of 64 ids: where they are split over two devices the second has none of them
TIED = dataclasses.replace(TIED, vocab_size=64)


def cut(config, params):
    """The model without the padding of its head."""
    known = config.known_ids
    rows = {"embed": params["embed"][:known]}
    if "unembed" in params:
        rows["unembed"] = params["unembed"][:, :known]
    return dataclasses.replace(config, vocab_size=known, known_ids=None), params | rows


def padded(config, factor=5.0):
    """Parameters whose padding would be likelier than the ids that are known."""
    name = "embed" if config.tie_embeddings else "unembed"
    params = init_params(config, 0)
    matrix = params[name] if config.tie_embeddings else params[name].T
    matrix = matrix.at[config.known_ids :].multiply(factor)
    return params | {name: matrix if config.tie_embeddings else matrix.T}


# ------------------------------------------------------------------ the model


def test_logits_are_those_of_before_and_of_padding_nothing():
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    for config in (TIED, CAPPED):
        params, masked = init_params(config, 0), with_known_ids(config, KNOWN)
        before, now = (unembed(c, params, hidden) for c in (config, masked))
        np.testing.assert_array_equal(now[:, :KNOWN], before[:, :KNOWN])
        np.testing.assert_array_equal(now[:, KNOWN:], np.float32(FILTERED))


def test_as_many_ids_as_rows_are_no_mask():
    assert with_known_ids(TIED, 63).known_ids == 63
    for none in (None, 64, 65):
        assert with_known_ids(TIED, none) == TIED


CASES = {
    "tied": (TIED, KNOWN, None, "xla"),
    "untied, split": (CAPPED, KNOWN, SPLIT, "xla"),
    "tiles": (TIED, KNOWN, None, "tiles"),
    "tiles, split": (CAPPED, 40, SPLIT, "tiles"),
    "kernel": (TIED, KNOWN, None, "interpret"),
    "kernel, split": (CAPPED, KNOWN, SPLIT, "interpret"),
    "kernel, shared": (WIDE, 200, {"fsdp": 8}, "interpret"),
    "tiles, shared": (WIDE, 200, {"fsdp": 8}, "tiles"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_has_the_numbers_of_a_head_without_padding(name, monkeypatch):
    """Log-probs, entropies, and gradients, which are 0 to the last bit for padding."""
    monkeypatch.setattr("jaxrl.models.kernels.head_log_probs.XLA_IDS", 25)
    config, known, mesh, kernel = CASES[name]
    config = with_known_ids(config, known)
    tokens, lengths, mask, cotangents = drawn()
    tokens, params = tokens % known, padded(config)
    of_cut, cut_params = cut(config, params)

    def theirs(params):
        return whole(of_cut, params, tokens, lengths, mask)

    ours = functools.partial(
        log_probs_and_entropy,
        config,
        rows=one_per_row(tokens, lengths, mask),
        temperature=TEMPERATURE,
        dtype=jnp.float32,
        head_kernel=kernel,
        placement=mesh and Placement(make_mesh(**mesh)),
    )
    for found, expected in zip(jax.jit(ours)(params), jax.jit(theirs)(cut_params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    found = jax.jit(jax.grad(weighted(ours, cotangents)))(params)
    expected = jax.jit(jax.grad(weighted(theirs, cotangents)))(cut_params)
    assert not np.any(found["embed"][known:])
    assert "unembed" not in found or not np.any(found["unembed"][:, known:])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        cut(config, found)[1],
        expected,
    )


def test_a_teacher_of_another_width_has_the_same_ids():
    """Whole distributions: of the ids that both know, whatever padding either has."""
    student = with_known_ids(CAPPED, KNOWN)
    teacher = with_known_ids(dataclasses.replace(TIED, vocab_size=80), KNOWN)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3, 32)), jnp.float32)
    params = [padded(config) for config in (student, teacher)]
    of_teacher = Head(teacher, 0.9, jnp.float32, with_entropy=False)
    head = Head(student, 0.9, jnp.float32, with_entropy=False, teacher=of_teacher)
    logits = head.logits(params[0], hidden[0])
    found = head.divergence(logits, 0.3, (hidden[1],), params[1])
    cuts = [cut(config, p) for config, p in zip((student, teacher), params, strict=True)]
    log_probs = [
        jax.nn.log_softmax(unembed(*model, states) / 0.9)
        for model, states in zip(cuts, hidden, strict=True)
    ]
    np.testing.assert_allclose(found, generalized_jsd(*log_probs, 0.3), atol=1e-5)


def test_of_weights_it_says_nothing(tmp_path):
    """Checkpoints, folders, exports, and adapters of a model are the same whatever it is."""
    model = hf.load_config(TINY)
    masked = with_known_ids(model, 40)
    assert describe(masked) == describe(model)
    params = init_params(model, 0)
    for config, name in ((model, "all"), (masked, "known")):
        save_pretrained(tmp_path / name, config, params)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "known" / name).read_bytes()
    hf.load_or_init(tmp_path / "all", masked, random_init=False, seed=0, shardings=None)


# ------------------------------------------------------------------ the sampler


SAMPLED = with_known_ids(LLAMA, 20)
OPTIONS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_k": 25, "top_p": 0.95, "min_p": 0.001},
    "penalised": {"repetition_penalty": 2.0},
}


@functools.cache
def likelier_padding():
    """The padding would be drawn: its rows of the head are as the most common known one."""
    params = random_params(LLAMA)
    return params | {"embed": params["embed"].at[20:].multiply(3.0)}


@functools.cache
def samples(config, name, devices=1, drafts=0):
    sizes = {"data": 1, "tensor": 2} if devices == 2 else {}
    mesh = make_mesh(devices=jax.devices()[:devices], **sizes)
    settings = {"max_num_seqs": 4, "steps_per_dispatch": 8, "speculative_tokens": drafts}
    engine = NativeEngine(config, mesh, shrink=False, **settings)
    engine.update_weights(likelier_padding(), 0)
    asks = [
        Request((3, 1 + n, 4) * 2, ((7, n), (8, n)), Sampling(10, **OPTIONS[name]))
        for n in range(8)
    ]
    return asks, engine.generate(asks)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "devices", "drafts"),
    [*((name, 1, 0) for name in OPTIONS), ("plain", 2, 0), ("filtered", 2, 0), ("plain", 1, 3)],
)
def test_no_such_id_is_drawn(name, devices, drafts):
    _, found = samples(SAMPLED, name, devices, drafts)
    assert all(token < 20 for c in flat(found) for token in c.tokens)
    assert all(np.isfinite(c.log_probs).all() for c in flat(found))


def test_without_it_they_would_be_drawn():
    _, found = samples(LLAMA, "plain")
    unknown = [token >= 20 for c in flat(found) for token in c.tokens]
    assert np.mean(unknown) > 0.2


def test_sampler_and_trainer_agree():
    asks, found = samples(SAMPLED, "plain")
    rows = [
        [*ask.prompt_tokens, *c.tokens] for ask, cs in zip(asks, found, strict=True) for c in cs
    ]
    tokens = np.array(rows, np.int32)
    given = one_per_row(tokens, np.full(len(rows), 16, np.int32), np.ones(tokens.shape))
    score = functools.partial(log_probs_and_entropy, temperature=1.0, dtype=jnp.float32)
    log_probs, _ = jax.jit(functools.partial(score, SAMPLED))(likelier_padding(), given)
    expected = np.array([c.log_probs for c in flat(found)])
    np.testing.assert_allclose(log_probs[:, 6:], expected, atol=1e-4)


def test_the_engine_of_any_model_leaves_them_out_too():
    """By the same keys it draws the same tokens."""
    asks, found = samples(SAMPLED, "plain")
    engine = RecomputeEngine(SAMPLED, make_mesh(devices=jax.devices()[:1]))
    engine.update_weights(likelier_padding(), 0)
    assert [c.tokens for c in flat(engine.generate(asks[:2]))] == [
        c.tokens for c in flat(found[:2])
    ]


@pytest.mark.slow  # the same logits as of the other tests, in tiles
@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("parts", [1, 2])
def test_in_the_exact_mode_to_the_last_bit(parts):
    model = with_known_ids(exact.MODEL, 40)
    tiles = exact.choose_tiles("log_probs", "cpu", tokens=None, parts=parts)
    mesh = make_mesh(devices=jax.devices()[:2], data=1, tensor=2) if parts == 2 else None
    drawn = exact.sampled(exact.engine_of(model, tiles, jnp.bfloat16, mesh))
    assert all(token < 40 for _, c in drawn for token in c.tokens)
    rows, expected = exact.rows_of(drawn)
    assert np.array_equal(exact.scored(model, tiles, jnp.bfloat16, rows), expected)


# ------------------------------------------------------------------ a run


PATH, IDS = "trainer.policy.model.path", "trainer.policy.known_ids"


@pytest.fixture(name="wide")
def wide_fixture(tmp_path):
    """A folder with 64 rows for the 48 ids of its tokenizer."""
    folder = tmp_path / "wide"
    shutil.copytree(TINY, folder)
    changed_json("config.json", vocab_size=64)(folder)
    return {PATH: str(folder)}


def built(config):
    run = BasePPOExp(config)
    trainer = run.build()
    trainer.recorder.close()
    return run, trainer


def test_a_new_run_takes_the_ids_of_its_tokenizer(tmp_path, wide):
    run, trainer = built(small(tmp_path, **wide))
    ids = [trainer.model, trainer.engine.programs.config, trainer.reference.weights.model]
    assert [model.known_ids for model in ids] == [48] * 3
    assert trainer.config.trainer.policy.known_ids == 48
    assert trainer.checkpoint_meta["config"]["trainer"]["policy"]["known_ids"] == 48
    assert "known_ids=48: those of the tokenizer, of 64 of the model" in run.chosen
    _, trainer = built(small(tmp_path / "equal"))
    assert trainer.model.known_ids is trainer.config.trainer.policy.known_ids is None


class OwnEngineExp(BasePPOExp):
    def get_engine(self, model, mesh):
        return super().get_engine(model, mesh)


def test_an_engine_of_ones_own_draws_what_it_likes(tmp_path, wide):
    trainer = OwnEngineExp(small(tmp_path, **wide)).build()
    trainer.recorder.close()
    assert trainer.model.known_ids is trainer.config.trainer.policy.known_ids is None


@pytest.mark.parametrize(("recorded", "expected"), [(48, 48), (50, 50), (None, None), ("", None)])
def test_a_run_goes_on_with_the_ids_that_it_began_with(tmp_path, wide, recorded, expected):
    """Of "" the checkpoint is of a version that had no such field."""
    config = small(tmp_path, **wide)
    settings = cfg.get_config_as_dict(
        cfg.resolve(cfg.apply_overrides(config, {IDS: recorded or None}))
    )
    if recorded == "":
        del settings["trainer"]["policy"]["known_ids"]
    meta = tmp_path / "checkpoints" / "global_step_2" / "meta" / "metadata"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"config": settings}))
    assert recorded_settings(config.trainer)[1]
    _, trainer = built(config)
    assert trainer.model.known_ids == trainer.config.trainer.policy.known_ids == expected


def test_a_reference_of_another_width_has_the_same_ids(tmp_path, wide):
    folder = tmp_path / "reference"
    shutil.copytree(TINY, folder)
    changed_json("config.json", vocab_size=80)(folder)
    config = cfg.resolve(small(tmp_path, **wide, **{"trainer.ref.model.path": str(folder)}))
    policy = with_known_ids(hf.load_config(wide[PATH]), 48)
    assert reference_model(config.trainer, policy).known_ids == 48
    shutil.copy(TINY / "config.json", folder)
    assert reference_model(config.trainer, policy).known_ids is None  # it has no others


class Stopped(Exception):
    """Carries the model that a server would compile."""


def served(make, config, monkeypatch):
    def stop(settings, model, *_, **__):
        raise Stopped(model)

    monkeypatch.setattr(make, "native_engine", stop)
    with pytest.raises(Stopped) as stopped:
        make.make_server(config)
    return stopped.value.args[0].known_ids


def test_a_server_leaves_them_out_and_a_worker_as_its_run(tmp_path, wide, monkeypatch):
    config = small(tmp_path, **wide)
    assert served(serve, config, monkeypatch) == 48
    assert served(serve, small(tmp_path), monkeypatch) is None
    for own, expected in ((None, None), (40, 40)):
        changes = {IDS: own, "trainer.placement.rollout_num_nodes": 1}
        of_run = cfg.resolve(cfg.apply_overrides(config, changes))
        assert served(serve, worker_config(of_run), monkeypatch) == expected


def test_a_training_service_goes_on_as_it_began(tmp_path, wide, monkeypatch):
    root = tmp_path / "tinker"
    config = small(tmp_path, **wide, **{"tinker.root": str(root)})
    assert [served(tinker, config, monkeypatch) for _ in range(2)] == [48, 48]
    with sqlite3.connect(root / "journal.db") as db:  # as an earlier version has written it
        ((text,),) = db.execute("SELECT facts FROM service").fetchall()
        facts = json.loads(text)
        assert facts.pop("known_ids") == 48
        db.execute("UPDATE service SET facts = ?", (json.dumps(facts),))
        db.executescript("DROP TABLE seals; PRAGMA user_version = 0")
    assert served(tinker, config, monkeypatch) is None


@pytest.mark.slow  # runs of a shape of their own
def test_runs_with_and_without(tmp_path, wide):
    """With them none is drawn. Without, as runs of earlier versions are, a part of all; such a run
    goes on without, bit for bit."""
    none = small(tmp_path / "masked", **wide)
    train(none)
    lines = metric_lines(tmp_path / "masked")
    assert [line["generate/unknown_ids"] for line in lines[1:]] == [0] * 4
    assert max(line["policy/rollout_train_logprobs_abs_diff_max"] for line in lines[1:]) < 1e-4

    def without(folder, **changes):
        return train(small(tmp_path / folder, **wide, **changes))

    whole = without("whole", **{IDS: 64})
    lines = metric_lines(tmp_path / "whole")
    assert all(line["generate/unknown_ids"] > 0 for line in lines[1:])
    without("cut", **{IDS: 64, "trainer.max_training_steps": 2})
    for path in (tmp_path / "cut" / "checkpoints").glob("*/meta/metadata"):
        meta, _ = unsealed(path.read_text())
        del meta["config"]["trainer"]["policy"]["known_ids"]
        path.write_text(json.dumps(meta))
    written = tmp_path / "cut" / "quickstart" / "config.yaml"
    lines = unsealed_text(written.read_text()).splitlines(keepends=True)
    written.write_text("".join(line for line in lines if "known_ids" not in line))
    assert len(written.read_text().splitlines()) == len(lines) - 1
    resumed = without("cut")
    assert resumed.config.trainer.policy.known_ids is None
    assert_bitwise_equal(resumed.state.params, whole.state.params)
