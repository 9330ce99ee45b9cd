"""Trajectories on disk come back as they were."""

import os
import stat

import numpy as np
import pytest

from jaxrl.data.columns import NO_ROUTES, ROUTES, ROUTES_PROCESS
from jaxrl.data.recorded import file_digest, own_routes, routes_digest, to_arrays, write_routes
from jaxrl.records.ledger import read_rollouts, rollouts_path, write_rollouts
from jaxrl.types import Measured, TrajectoryID

UIDS = ["0:3", "0:3"]


def columns(**changes):
    """Two trajectories, the first with a reward per token, the second with one number."""
    output = {
        "prompt_token_ids": [[5, 13], [7]],
        "response_ids": [[1, 2, 45], [9]],
        "rewards": [[0.0, 0.1, 1 / 3], 0.7],
        "loss_masks": [[1, 0, 1], [1]],
        "stop_reasons": ["stop", "length"],
        "rollout_logprobs": [[float(np.float32(-0.1)), 0.0, -2.5], [-1.25]],
        "policy_versions": [3, 4],
        "rollout_metrics": {"generate/avg_turns": 1.5},
        "trajectory_ids": [TrajectoryID("0:3", 0), TrajectoryID("0:3", 1)],
        "ledger_ids": [11, 12],
        "token_versions": [[3, -1, 4], [4]],
        "context_versions": [[3, -1, 3], [4]],
        "kept": [[(1, 8), (), (45,)], [()]],
        "reward_terms": [{"form": 0.1}, {}],
        "is_last_step": [True, True],
    }
    return {**output, **changes}


@pytest.mark.parametrize("changes", [{}, {"rollout_logprobs": None, "rewards": [0.1, 0.2]}])
def test_every_column_comes_back(tmp_path, changes):
    path, output = tmp_path / "rollouts" / "step_000001.npz", columns(**changes)
    digest = write_rollouts(path, to_arrays(output), UIDS)
    found, uids = read_rollouts(path)
    assert found == output and uids == UIDS
    assert isinstance(found["trajectory_ids"][0], TrajectoryID)
    assert file_digest(path) == digest
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, done, replace = tmp_path / "step_000001.npz", [], os.replace

    def fsync(file):
        found = os.fstat(file)
        done.append("its folder" if stat.S_ISDIR(found.st_mode) else found.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("named"), replace(*names)))
    write_rollouts(path, to_arrays(columns()), UIDS)
    assert done == [path.stat().st_size, "named", "its folder"]


def test_columns_of_a_custom_generator(tmp_path):
    path = tmp_path / "step_000001.npz"
    write_rollouts(path, to_arrays(columns(score=[np.float32(0.5), np.int64(2)])), UIDS)
    assert read_rollouts(path)[0]["score"] == [0.5, 2]
    with pytest.raises(TypeError, match="column 'score' of the rollouts holds a object, which is"):
        to_arrays(columns(score=[object()]))
    measured = [Measured("my.env:Talk", {"mood": object()}, 0.0, [(0, 1)], "")]
    with pytest.raises(TypeError, match="measured in environment my.env:Talk holds a object"):
        to_arrays(columns(measured=measured))


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_was_cut_is_named(tmp_path, size):
    path = tmp_path / "step_000001.npz"
    digest = write_rollouts(path, to_arrays(columns()), UIDS)
    path.write_bytes(path.read_bytes()[:size])
    assert file_digest(path) != digest
    with pytest.raises(ValueError, match=r"step_000001.npz is damaged"):
        read_rollouts(path)


def test_a_flipped_bit_is_named_or_changes_nothing(tmp_path):
    path, output = tmp_path / "step_000001.npz", columns()
    digest = write_rollouts(path, to_arrays(output), UIDS)
    whole = path.read_bytes()
    named = 0
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert file_digest(path) != digest
        try:
            found, uids = read_rollouts(path)
        except ValueError as error:
            named += "step_000001.npz" in str(error)
        else:  # a date, or the like
            assert found == output and uids == UIDS
    assert named > len(whole) / 11 / 4


# ---- of a job, each of whose processes has the experts of what it sampled


def of_job(folder, *, rows=(0, 1, 1)):
    """Write a step of two processes as they do; returns the path of the first and all experts."""
    routes = [np.full((n, 2, 1), n, np.uint8) for n in (3, 1, 2)]
    path, outputs = rollouts_path(folder, 3), []
    for process in (0, 1):
        given = zip(routes, rows, strict=True)
        own = [x if at == process else NO_ROUTES for x, at in given]
        changes = {ROUTES: own, ROUTES_PROCESS: list(rows)}
        outputs.append({"response_ids": [[1, 2, 45], [9], [9, 9]], **changes})
    own = [own_routes(output, process) for process, output in enumerate(outputs)]
    digests = [routes_digest(x) for x in own]
    write_rollouts(path, to_arrays(outputs[0]), UIDS, routes_digests=digests)
    write_routes(rollouts_path(folder / "processes/1", 3), own[1])
    return path, routes


def test_the_files_of_a_job_are_read_together(tmp_path):
    path, routes = of_job(tmp_path)
    found, _ = read_rollouts(path)
    assert ROUTES_PROCESS not in found
    for mine, stored in zip(routes, found[ROUTES], strict=True):
        np.testing.assert_array_equal(mine, stored)
    of_job(tmp_path, rows=(0, 0, 0))  # the second has sampled nothing
    assert [len(x) for x in read_rollouts(path)[0][ROUTES]] == [3, 1, 2]


def test_a_file_of_another_process_that_is_gone_or_damaged_is_named(tmp_path):
    path, _ = of_job(tmp_path)
    other = tmp_path / "processes/1/rollouts/step_000003.npz"
    data = other.read_bytes()
    write_routes(other, own_routes({ROUTES: [NO_ROUTES], ROUTES_PROCESS: [1]}, 1))
    with pytest.raises(ValueError, match=r"processes/1/.*000003.npz is not what process 1 wrote"):
        read_rollouts(path)
    other.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"processes/1/rollouts/step_000003.npz is damaged"):
        read_rollouts(path)
    other.unlink()
    with pytest.raises(FileNotFoundError, match=r"is gone, the experts .* that process 1 sampled"):
        read_rollouts(path)
    without, _ = read_rollouts(path, with_routes=False)  # as a report does
    assert without["response_ids"] == [[1, 2, 45], [9], [9, 9]]
    assert not {ROUTES, ROUTES_PROCESS} & set(without)
