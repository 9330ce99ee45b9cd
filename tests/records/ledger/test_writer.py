"""What a real run leaves in the ledger."""

import json
import sqlite3
from typing import ClassVar

import jax
import numpy as np
import pytest

from jaxrl.config.trainer import LedgerConfig
from jaxrl.data.columns import NO_ROUTES, ROUTES, ROUTES_PROCESS, take_rows
from jaxrl.data.order import DataOrder
from jaxrl.data.packing import empty_batch
from jaxrl.data.recorded import file_digest
from jaxrl.files import FolderError
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.records.ledger import FILE, read_rollouts, rollouts_path, writer
from jaxrl.records.ledger.writer import LedgerWriter, Taken, _judged, _reasons, step_checksums
from jaxrl.replay import replay
from jaxrl.train import BasePPOExp, train
from jaxrl.trainer import Trainer
from tests.full_disk import Disk
from tests.test_train import small


def table(folder, query):
    with sqlite3.connect(folder / "quickstart" / FILE) as db:
        return db.execute(query).fetchall()


ALL_OF_A_TRAJECTORY = """
    SELECT g.ordinal, g.uid, g.step, t.sample, t.reward, t.tokens, e.step, e.reason
    FROM groups g JOIN trajectories t ON t.group_id = g.id JOIN ends e ON e.trajectory_id = t.id
    WHERE g.superseded IS NULL AND t.superseded IS NULL AND e.superseded IS NULL
    ORDER BY g.ordinal, t.sample"""


def test_every_trajectory_of_a_run_is_accounted_for(finished):
    folder, trainer = finished
    found = table(folder, ALL_OF_A_TRAJECTORY)
    assert len(found) == 4 * 4 * 4  # steps x prompts x samples
    order = DataOrder((64,), (4,), seed=42)
    order = [trainer.train_prompts[i].uid for d in range(4) for i in order.batch(d)]
    assert [(o, uid) for o, uid, *_ in found[::4]] == list(enumerate(order))
    for ordinal, _, handed, sample, *_, step, reason in found:
        assert (handed, step, reason) == (ordinal // 4, ordinal // 4 + 1, None)
        assert sample < 4
    batch = load_batch(batch_path(folder / "exports", 3))
    rewards, lengths = batch.rewards.sum(-1), batch.loss_mask.sum(-1)
    np.testing.assert_allclose([row[4] for row in found[32:48]], rewards, rtol=1e-6)
    assert [row[5] for row in found[32:48]] == lengths.tolist()


def test_a_trajectory_has_its_first_and_last_version_and_the_reward_of_its_last_row():
    output = {
        "rewards": [[0.0], [0.5, 1.0], 9.0],
        "loss_masks": [[1], [1, 0], [1]],
        "token_versions": [[3], [5, -1], [7]],
        "policy_versions": [3, 4, 7],
        "stop_reasons": ["stop", "length", "stop"],
    }
    assert _judged(output, 0, 1) == (1.5, 2, "length", 3, 5)
    del output["token_versions"]
    assert _judged(output, 0, 1) == (1.5, 2, "length", 3, 3)


def test_steps_have_their_rollouts_and_checksums(finished):
    folder, trainer = finished
    steps = table(folder, "SELECT step, file, file_digest, checksums FROM steps")
    assert [step for step, *_ in steps] == [1, 2, 3, 4]
    for step, file, digest, _ in steps:
        path = rollouts_path(folder / "quickstart", step)
        assert path == folder / "quickstart" / file and file_digest(path) == digest
        output, uids = read_rollouts(path)
        batch = load_batch(batch_path(folder / "exports", step))
        at = int(batch.lengths[0])
        assert batch.tokens[0, :at].tolist() == (
            output["prompt_token_ids"][0] + output["response_ids"][0]
        )
        assert len(uids) == len(batch.index) == 16
    numbers = json.loads(steps[-1][3])
    assert numbers == step_checksums(trainer.batch, trainer.state)
    assert {"batch.tokens", "batch.advantages", "state.step"} <= set(numbers)
    assert json.loads(steps[0][3])["state.step"] != numbers["state.step"]


class StoppedTrainer(Trainer):
    """Stops in the update of the fourth step: two steps after its checkpoint, one recorded."""

    def update(self, batch, step):
        if step == 4:
            raise KeyboardInterrupt
        super().update(batch, step)


class StoppedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return StoppedTrainer(*args, **kwargs)


def test_a_resumed_run_takes_back_and_does_again(finished, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        StoppedExp(small(tmp_path)).run()
    in_flight = "SELECT COUNT(*) FROM groups WHERE ordinal >= 12"  # handed out in step 4
    assert table(tmp_path, in_flight) == [(4,)]
    assert table(tmp_path, "SELECT MAX(step) FROM ends") == [(3,)]
    kept = tmp_path / "quickstart" / "rollouts" / "step_old.npz"
    kept.write_text("mine")
    train(small(tmp_path))
    assert table(tmp_path, ALL_OF_A_TRAJECTORY) == table(finished[0], ALL_OF_A_TRAJECTORY)
    taken_back = "SELECT ordinal, superseded FROM groups WHERE superseded IS NOT NULL"
    assert table(tmp_path, taken_back) == [(ordinal, 2) for ordinal in range(8, 16)]
    attempts = table(tmp_path, "SELECT attempt, from_step, first_ordinal, origin FROM attempts")
    assert attempts == [(1, 0, 0, ""), (2, 2, 8, "")]
    assert kept.read_text() == "mine"
    names = sorted(path.name for path in kept.parent.glob("step_0*"))
    assert names == [f"step_00000{step}.npz" for step in (1, 2, 3, 4)]


@pytest.mark.slow
def test_dynamic_sampling_says_what_it_dropped(tmp_path):
    settings = {
        "trainer.algorithm.dynamic_sampling.type": "filter",
        "trainer.algorithm.advantage_estimator": "grpo",
        "generator.n_samples_per_prompt": 2,
        "trainer.eval_interval": -1,
        "trainer.hf_save_interval": -1,
    }
    train(small(tmp_path, **settings))
    reasons = dict(table(tmp_path, "SELECT reason, COUNT(*) FROM ends GROUP BY reason"))
    sampled = table(tmp_path, "SELECT COUNT(*) FROM trajectories")[0][0]
    assert reasons == {None: 32, "dynamic_sampling": sampled - 32}
    assert sampled > 32


class ShapingTrainer(Trainer):
    """Changes rewards in place, leaves the first prompt out and takes the others backwards."""

    phases: ClassVar[list[str]] = []
    rewards: ClassVar[list[list[float]]] = []

    async def sample(self, phase, *args, **kwargs):
        self.phases.append(phase)
        return await super().sample(phase, *args, **kwargs)

    def postprocess_generator_output(self, generator_output, uids):
        rewards = generator_output["rewards"]
        self.rewards[:] = rewards
        generator_output["rewards"] = [[r - 0.25 for r in response] for response in rewards]
        output = super().postprocess_generator_output(generator_output, uids)
        masks = output["loss_masks"]
        masks[12] = [0] * len(masks[12])
        return take_rows(output, np.r_[12:16, 8:12, 4:8])


class ShapingExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return ShapingTrainer(*args, **kwargs)


def test_rollouts_are_recorded_as_they_came_and_rows_that_are_left_out_are_filtered(tmp_path):
    quiet = dict.fromkeys((f"trainer.{name}_interval" for name in ("eval", "ckpt", "hf_save")), -1)
    ShapingExp(small(tmp_path, **{**quiet, "trainer.max_training_steps": 1})).run()
    assert ShapingTrainer.phases == ["train"]
    recorded, _ = read_rollouts(rollouts_path(tmp_path / "quickstart", 1))
    assert recorded["rewards"] == ShapingTrainer.rewards
    left_out = ["filtered"] * 4  # the first prompt
    masked = ["filtered"]  # the first sample of the last one
    assert [row[-1] for row in table(tmp_path, ALL_OF_A_TRAJECTORY)] == (
        left_out + [None] * 8 + masked + [None] * 3
    )
    *_, result = replay(tmp_path / "quickstart", run_class=ShapingExp)
    assert result.step == 1 and not result.different


def test_rows_of_the_batch_are_known_by_their_row_ids():
    taken = Taken(None, [], {7: "stop", 8: "abort", 9: "stop"}, np.array([9, 7, 8]))
    masks = np.array([[0, 1], [1, 1], [0, 0]], np.float32)
    batch = empty_batch(3, 2).replace(loss_mask=masks)
    assert _reasons(taken, batch, None) == {7: None, 8: "abort", 9: None}
    skipped = np.array([True, False, False])
    assert _reasons(taken, batch, skipped) == {7: None, 8: "abort", 9: "skipped_update"}
    # in another order: rows 2, 0, 1; which ones were skipped is said in the order of row_ids
    reordered = jax.tree.map(lambda x: x[np.array([2, 0, 1])], batch)
    assert list(reordered.row_ids) == [2, 0, 1]
    assert _reasons(taken, reordered, skipped) == {7: None, 8: "abort", 9: "skipped_update"}
    fewer = jax.tree.map(lambda x: x[1:], batch)
    assert _reasons(taken, fewer, None) == {7: None, 8: "abort", 9: "filtered"}
    more = batch.replace(row_ids=np.array([0, 1, 3]))
    with pytest.raises(ValueError, match="row_ids up to 3, the trajectories are 3: an override"):
        _reasons(taken, more, None)


class OverflowingTrainer(Trainer):
    """The rewards of the first prompt of step 2 are infinite: its minibatch has no gradient."""

    def add_advantages(self, batch):
        batch = super().add_advantages(batch)
        if self.state.step == 1 and hasattr(self, "batches_drawn") and self.batches_drawn == 2:
            advantages = np.array(batch.advantages)
            advantages[0] = np.inf
            batch = batch.replace(advantages=advantages)
        return batch


class OverflowingExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return OverflowingTrainer(*args, **kwargs)


def test_a_skipped_update_is_no_training(tmp_path):
    OverflowingExp(small(tmp_path, **{"trainer.max_training_steps": 2})).run()
    found = table(tmp_path, ALL_OF_A_TRAJECTORY)
    reasons = [row[-1] for row in found]
    # step 2 is prompts 4 to 7 of 4 samples; its first minibatch, of two prompts, was skipped
    assert reasons == [None] * 16 + ["skipped_update"] * 8 + [None] * 8


@pytest.fixture
def second(tmp_path, monkeypatch):
    """The writer of the second of two processes, and what it is to write of a step."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(writer, "allgather", lambda value: ["of the first", value])
    made = LedgerWriter(tmp_path, LedgerConfig(record_checksums=False))
    routes = np.arange(6, dtype=np.uint8).reshape(3, 2, 1)
    output = {"response_ids": [[1], [2]], "stop_reasons": ["stop"] * 2}
    yield made, {**output, ROUTES: [NO_ROUTES, routes], ROUTES_PROCESS: [0, 1]}
    made.close()


def test_a_process_that_is_not_the_first_writes_its_experts(second, tmp_path):
    made, output = second
    path = rollouts_path(tmp_path / "processes/1", 3)
    path.parent.mkdir(parents=True)
    for step in (2, 3, 4):  # of which the last two are taken back
        rollouts_path(tmp_path / "processes/1", step).touch()
    made.begin(2, first_ordinal=0, facts={}, machine={}, uids=[])
    assert [x.name for x in path.parent.iterdir()] == ["step_000002.npz"]
    made.take(output, ["0:1", "0:2"])
    assert made.commit() is None
    made.end_step(3, empty_batch(2, 8), None)
    made.commit()  # it is on disk before the checkpoint is
    with np.load(path) as file:
        np.testing.assert_array_equal(file[ROUTES].ravel(), range(6))
        assert file[f"{ROUTES}.lengths"].tolist() == [3]
    assert sorted(x.name for x in tmp_path.rglob("*.*")) == ["step_000002.npz", "step_000003.npz"]


def test_what_it_cannot_write_ends_the_run_before_a_checkpoint(second, monkeypatch):
    made, output = second
    Disk(monkeypatch, made.folder, ".npz.new")
    made.begin(0, first_ordinal=0, facts={}, machine={}, uids=[])
    made.take(output, ["0:1", "0:2"])
    made.end_step(1, empty_batch(2, 8), None)
    with pytest.raises(FolderError, match=r"processes/1/.*npz .No space left on device\): free"):
        made.commit()
