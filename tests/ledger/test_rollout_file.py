"""Trajectories on disk come back as they were."""

import numpy as np
import pytest

from jaxrl.ledger import read_rollouts, write_rollouts
from jaxrl.ledger.rollout_file import file_digest
from jaxrl.types import TrajectoryID

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
        "kept": [[(1, 8), (), (45,)], [()]],
        "reward_terms": [{"form": 0.1}, {}],
        "is_last_step": [True, True],
    }
    return {**output, **changes}


@pytest.mark.parametrize("changes", [{}, {"rollout_logprobs": None, "rewards": [0.1, 0.2]}])
def test_every_column_comes_back(tmp_path, changes):
    path, output = tmp_path / "rollouts" / "step_000001.npz", columns(**changes)
    digest = write_rollouts(path, output, UIDS)
    found, uids = read_rollouts(path)
    assert found == output and uids == UIDS
    assert isinstance(found["trajectory_ids"][0], TrajectoryID)
    assert file_digest(path) == digest
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_columns_of_a_custom_generator(tmp_path):
    path = tmp_path / "step_000001.npz"
    write_rollouts(path, columns(score=[np.float32(0.5), np.int64(2)]), UIDS)
    assert read_rollouts(path)[0]["score"] == [0.5, 2]
    with pytest.raises(TypeError, match="holds a object, which is not JSON"):
        write_rollouts(path, columns(score=[object()]), UIDS)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "step_000001.npz"
    digest = write_rollouts(path, columns(), UIDS)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        at = data.index(np.array([5, 13, 7], np.int32).tobytes())
        data[at] ^= 1
    path.write_bytes(data if damage == "flip" else data[: 100 * (damage == "cut")])
    assert file_digest(path) != digest
    with pytest.raises(ValueError, match=r"step_000001.npz is damaged"):
        read_rollouts(path)
