"""A training batch on disk is the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.files import FolderError
from jaxrl.records.batch_file import batch_path, dump_batch, load_batch
from jaxrl.types import TrainBatch

SHAPED = dict.fromkeys(("response_mask", "loss_mask", "rewards", "advantages"), np.float32)


def make_batch(**fields):
    arrays = {name: np.arange(12, dtype=kind).reshape(2, 6) / 7 for name, kind in SHAPED.items()}
    ids = {
        name: np.array([3, 4], np.int32)
        for name in ("lengths", "index", "policy_versions", "row_ids")
    }
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    return TrainBatch(tokens=tokens, rollout_log_probs=None, **ids, **arrays).replace(**fields)


def test_what_is_loaded_is_what_was_dumped(tmp_path):
    versions = {"token_versions": np.full((2, 6), 3, np.int32)}
    kept = np.full((2, 6, 3), -1, np.int32)
    batch = make_batch(old_log_probs=jnp.ones((2, 6)), kept=kept, **versions)
    path = batch_path(tmp_path, 7)
    assert path == tmp_path / "dumped_data" / "global_step_7_training_input.npz"
    dump_batch(path, batch, 7)
    found = load_batch(path)
    for name in (field.name for field in dataclasses.fields(TrainBatch)):
        ours, theirs = getattr(batch, name), getattr(found, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            np.testing.assert_array_equal(ours, theirs, strict=True)
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_keys_of_the_file(tmp_path):
    dump_batch(tmp_path / "x.npz", make_batch(), 7)
    with np.load(tmp_path / "x.npz") as file:
        assert sorted(file.files) == [
            *("advantages", "format", "index", "lengths", "loss_mask", "policy_versions"),
            *("response_mask", "rewards", "row_ids", "step", "tokens"),
        ]
        assert (int(file["step"]), int(file["format"])) == (7, 1)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    dump_batch(path, make_batch(), 7)

    def broken(file, **arrays):
        file.write(b"PK")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(FolderError, match=f"cannot write {path} .disk full"):
        dump_batch(path, make_batch(rewards=np.zeros((2, 6), np.float32)), 8)
    np.testing.assert_array_equal(load_batch(path).rewards, make_batch().rewards)


def test_what_is_no_batch_is_refused(tmp_path):
    path = tmp_path / "global_step_2_training_input.npz"
    dump_batch(path, make_batch(), 2)
    with pytest.raises(FileNotFoundError, match=r"holds \['global_step_2_training_input.npz'\]"):
        load_batch(tmp_path / "global_step_3_training_input.npz")
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(tmp_path / "later.npz", **arrays, entropy=np.zeros(2))
    with pytest.raises(ValueError, match=r"unknown arrays \['entropy'\]"):
        load_batch(tmp_path / "later.npz")
    np.savez(tmp_path / "other.npz", tokens=arrays["tokens"])
    with pytest.raises(ValueError, match=r"lacks \['format', 'index'"):
        load_batch(tmp_path / "other.npz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a whole .npz file"):
        load_batch(path)
