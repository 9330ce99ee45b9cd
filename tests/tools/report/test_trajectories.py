"""Trajectories as the page gets them: groups, turns, and what was dumped of their batch."""

import numpy as np

from jaxrl.data.packing import collate
from jaxrl.data.recorded import to_arrays
from jaxrl.records.batch_file import batch_path, dump_batch
from jaxrl.records.ledger import write_rollouts
from jaxrl.tools.report.run_files import RunFiles
from jaxrl.tools.report.selection import PER_STEP, select
from jaxrl.tools.report.trajectories import pack_group, read_step
from jaxrl.tools.report.vocabulary import Vocabulary
from tests.tools.report.unpack import unpack


def columns(**changes):
    """Two samples of prompt "p" and one of "q"; the second of "p" has two turns."""
    given = {
        "prompt_token_ids": [[5, 6], [5, 6], [9]],
        "response_ids": [[7], [7, 8, 3, 4, 2], [8, 8]],
        "loss_masks": [[1], [1, 1, 0, 0, 1], [1, 1]],
        "rewards": [[1.0], [0.0, 0.25, 0.0, 0.5, 2.0], [0.0, 0.0]],
        "stop_reasons": ["stop", "length", "stop"],
        "rollout_logprobs": [[-0.5], [-1.0, -2.0, 0.0, 0.0, -3.0], [-0.25, -0.125]],
        "policy_versions": [3, 3, 3],
        "ledger_ids": [11, 12, 13],
        "rollout_metrics": {},
    }
    return given | changes


def recorded(tmp_path, uids=("p", "p", "q"), **changes):
    path = tmp_path / "step_000004.npz"
    write_rollouts(path, to_arrays(columns(**changes)), list(uids))
    run = RunFiles(tmp_path, rollouts={4: path}, has_ledger=True, dropped={13: "filtered"})
    run.settings = {"trainer": {"export_path": str(tmp_path / "exports")}}
    return run


def dump(run, *, order=(0, 1, 2)):
    """The batch of the recorded rows in this order, with one log-prob moved by log 2."""
    output = columns()
    rows = {k: [v[i] for i in order] for k, v in output.items() if isinstance(v, list)}
    batch = collate({**rows, "rollout_metrics": {}}, index=np.array([0, 0, 1])[list(order)])
    old = batch.rollout_log_probs.copy()
    old[order.index(1), 2] += np.log(2)  # first response token of the second row
    mask = batch.loss_mask.copy()
    mask[order.index(2)] = 0
    advantages = np.where(batch.response_mask > 0, np.arange(3)[list(order)][:, None], 0.0)
    new = {"old_log_probs": old, "loss_mask": mask, "advantages": advantages}
    batch = batch.replace(**new, row_ids=np.array(order))
    dump_batch(batch_path(run.trainer["export_path"], 4), batch, 4)


def packed(run, group=0):
    step = read_step(run, 4)
    uid, rows = step.groups[group]
    return unpack(pack_group(run, step, uid, rows, Vocabulary(None)))


def test_a_group_is_a_prompt_with_its_samples(tmp_path):
    header, arrays = packed(recorded(tmp_path))
    first, second = header["rows"]
    assert header["uid"] == "p"
    assert (first["trajectory"], second["trajectory"]) == (0, 1)
    assert (first["prompt"], second["prompt"]) == (2, -1)  # it is not stored twice
    # numbers in the order in which tokens are met: 5 6 7 | 7 8 3 4 2
    assert arrays["tokens"].tolist() == [0, 1, 2, 2, 3, 4, 5, 6]
    assert arrays["mask"].tolist() == [1, 1, 1, 0, 0, 1]
    assert arrays["log_probs"].tolist() == [-0.5, -1, -2, 0, 0, -3]
    assert (first["reward"], second["reward"]) == (1.0, 2.75)
    # what comes before the second turn was earned by the first: 0 + 0.25 + 0 + 0.5
    assert second["turns"] == [[0, 2, 0.75], [4, 5, 2.0]]
    assert (first["stop"], second["stop"], first["ended"]) == ("stop", "length", "trained")
    assert not {"advantages", "log_ratios", "trained", "versions"} & set(arrays)


def test_what_the_ledger_says_of_an_end(tmp_path):
    header, _ = packed(recorded(tmp_path), group=1)
    assert [row["ended"] for row in header["rows"]] == ["filtered"]
    run = recorded(tmp_path)
    run.has_ledger = False
    header, _ = packed(run, group=1)
    assert [row["ended"] for row in header["rows"]] == [""]


def test_one_reward_for_the_whole_response(tmp_path):
    header, arrays = packed(recorded(tmp_path, rewards=[1.0, 0.5, 0.0]))
    assert [row["reward"] for row in header["rows"]] == [1.0, 0.5]
    assert header["rows"][0]["turns"] == [[0, 1, None]]
    assert "rewards" not in arrays


def test_rows_of_one_trajectory(tmp_path):
    """Step-wise: the second and third row are turns of one, whose prompts differ."""
    run = recorded(
        tmp_path,
        uids=("p", "p"),
        is_last_step=[True, False, True],
        prompt_token_ids=[[5, 6], [5, 6], [5, 6, 7]],
    )
    header, _ = packed(run)
    assert [row["trajectory"] for row in header["rows"]] == [0, 1, 1]
    assert [row["prompt"] for row in header["rows"]] == [2, -1, 3]


def test_versions_of_tokens_that_others_drew(tmp_path):
    versions = [[3], [3, 3, -1, -1, 5], [3, 3]]
    _, arrays = packed(recorded(tmp_path, token_versions=versions))
    assert arrays["versions"].tolist() == [0, 0, 0, 0, 0, 2]


def test_what_was_dumped_of_the_batch(tmp_path):
    for order in ((0, 1, 2), (2, 0, 1)):  # row_ids say which row is which
        run = recorded(tmp_path)
        dump(run, order=order)
        _, arrays = packed(run)
        assert arrays["advantages"].tolist() == [0, 1, 1, 1, 1, 1]
        ratios = np.exp(arrays["log_ratios"].astype(np.float32))
        # half precision of log 2; observations have no ratio
        np.testing.assert_allclose(ratios, [1, 2, 1, np.nan, np.nan, 1], rtol=1e-3)
        assert arrays["trained"].tolist() == [1, 1, 1, 0, 0, 1]
        assert packed(run, group=1)[1]["trained"].tolist() == [0, 0]  # filtered
        assert not run.all_notes()


def test_a_dumped_batch_of_other_rows_is_said_and_left_out(tmp_path):
    run = recorded(tmp_path, response_ids=[[4], [7, 8, 3, 4, 2], [8, 8]])
    dump(run)
    _, arrays = packed(run)
    assert "advantages" not in arrays
    (note,) = run.all_notes()
    assert note.startswith("dumped batch of step 4: its row 0 is not the recorded trajectory 0")


def test_a_damaged_file_is_said_and_left_out(tmp_path):
    run = recorded(tmp_path)
    run.rollouts[5] = tmp_path / "step_000005.npz"
    run.rollouts[5].write_bytes(b"no zip")
    run.rollouts[9] = run.rollouts[5]
    found = select(run, lambda: Vocabulary(None), 100_000)
    assert list(found.blobs) == [4]
    (note,) = run.all_notes()
    assert note.startswith("trajectories of step 5 and of 1 more up to step 9: ")
    assert "is damaged" in note


# ------------------------------------------------------------------ when there is too much


def many(tmp_path, name="run", steps=12, groups=6, length=60, seed=0):
    """Steps of groups of one long response of random tokens, which do not compress."""
    folder, rng = tmp_path / name, np.random.default_rng(seed)
    run = RunFiles(folder)
    for step in range(1, steps + 1):
        tokens = rng.integers(0, 5000, (groups, length)).tolist()
        output = {
            "prompt_token_ids": [[1]] * groups,
            "response_ids": tokens,
            "loss_masks": [[1] * length] * groups,
            "rewards": [1.0] * groups,
            "stop_reasons": ["stop"] * groups,
            "rollout_logprobs": rng.normal(size=(groups, length)).tolist(),
            "policy_versions": [0] * groups,
            "rollout_metrics": {},
        }
        run.rollouts[step] = folder / f"step_{step:06d}.npz"
        uids = [f"0:{i}" for i in range(groups)]
        write_rollouts(run.rollouts[step], to_arrays(output), uids)
    return run


def chosen(run, room):
    found = select(run, lambda: Vocabulary(None), room)
    return found, {step: uids for step, (uids, _) in found.steps.items()}


def test_everything_where_there_is_room(tmp_path):
    run = many(tmp_path)
    found, kept = chosen(run, 10**6)
    assert (found.kept, found.total, found.steps_left_out) == (72, 72, 0)
    assert kept[3] == [f"0:{i}" for i in range(6)]  # in the order of the run
    assert found.size < 10**6


def test_whole_groups_evenly_over_the_steps_within_the_room(tmp_path):
    run = many(tmp_path)
    whole, _ = chosen(run, 10**6)
    found, kept = chosen(run, whole.size // 2)
    sizes = [len(uids) for uids in kept.values()]
    assert list(kept) == list(range(1, 13))
    assert min(sizes) >= 1
    assert max(sizes[2:]) <= min(sizes[2:]) + 2  # the first steps bring the vocabulary
    written = sum(map(len, sum(found.blobs.values(), []))) + PER_STEP * len(kept)
    assert written <= found.size <= whole.size // 2
    assert found.size > 0.8 * (whole.size // 2)  # the room is used
    assert found.kept == sum(sizes)
    assert chosen(run, whole.size // 2)[1] == kept  # the same ones again


def test_every_few_steps_where_a_share_holds_no_group(tmp_path):
    run = many(tmp_path, groups=1, length=300)
    whole, _ = chosen(run, 10**6)
    found, kept = chosen(run, whole.size // 3)
    assert 2 <= len(kept) <= 5
    assert found.steps_left_out == 12 - len(kept)
    assert max(kept) > 8  # not only the first ones


def test_two_runs_keep_the_same_prompts(tmp_path):
    one, other = many(tmp_path), many(tmp_path, "other", seed=1)
    room = chosen(one, 10**6)[0].size // 2
    (_, left), (_, right) = chosen(one, room), chosen(other, room)
    for step in left:
        few, more = sorted((set(left[step]), set(right[step])), key=len)
        assert few <= more
