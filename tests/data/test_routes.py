"""Experts of a job: what each process has of a batch, whose sum is what one process has."""

import zlib

import jax
import numpy as np
import pytest

from jaxrl.data import routes as routes_module
from jaxrl.data.columns import NO_ROUTES, ROUTES, ROUTES_PROCESS, take_trajectories
from jaxrl.data.microbatches import Microbatching, microbatches
from jaxrl.data.packing import collate, empty_batch, minibatches, row_slices
from jaxrl.rollout.conversations.across_processes import sample_across_processes
from jaxrl.rollout.conversations.concat_outputs import concat_outputs

LENGTHS = (5, 9, 3, 12, 7, 2, 11, 4)
SAMPLED = (0, 0, 0, 1, 1, 2, 2, 2)  # which of three processes has sampled each


def sampled_output():
    """A prompt token and a response; of all tokens but the last two layers, two experts of each.

    Of trajectory 1 nothing is known, nor of the third token of trajectory 4.
    """
    rng, rows, lengths = np.random.default_rng(0), len(LENGTHS), LENGTHS
    routes = [rng.integers(0, 8, (n - 1, 2, 2), np.uint8) for n in lengths]
    routes[1] = np.zeros((0, 2, 2), np.uint8)
    routes[4][2] = 255
    return {
        "prompt_token_ids": [[1]] * rows,
        "response_ids": [[2] * (n - 1) for n in lengths],
        "rewards": [[0.0] * (n - 1) for n in lengths],
        "loss_masks": [[1] * (n - 1) for n in lengths],
        "stop_reasons": ["stop"] * rows,
        "rollout_logprobs": None,
        "policy_versions": [0] * rows,
        "rollout_metrics": {},
        ROUTES: routes,
    }


def of_process(output, process, sampled=SAMPLED):
    """The columns as that process has them."""
    nothing = output[ROUTES][0][:0]
    own = [x if at == process else nothing for x, at in zip(output[ROUTES], sampled, strict=True)]
    return {**output, ROUTES: own, ROUTES_PROCESS: list(sampled)}


@pytest.fixture
def batches(monkeypatch):
    """The batch of one process, and those of the three processes of a job."""
    output, index, parts = sampled_output(), np.repeat(range(4), 2), []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(collate(of_process(output, process), index))
    return collate(output, index), parts


PADDED = {"rows": 4, "total": 8}
PACKED = {"rows": 2, "total": 8, "packed": True, "packed_length": 24}


@pytest.mark.parametrize(
    "settings",
    [PADDED, PADDED | {"context": 2}, PACKED, PACKED | {"context": 2, "groups": 2}],
    ids=["padded", "padded, spread", "packed", "packed, spread"],
)
@pytest.mark.parametrize("how", ["batch", "minibatches", "filled up", "longest first"])
def test_the_shares_of_a_microbatch_add_up_to_its_rows(batches, settings, how):
    cut = Microbatching(**settings)
    one = Microbatching(rows=8, total=8)

    def parts(batch):
        """The parts of a batch that are cut into microbatches, in any of the ways of a step."""
        if how == "minibatches":  # of prompts, of a further pass
            return minibatches(batch, 2, np.array([2, 0, 3, 1]))
        if how == "filled up":
            return list(row_slices(batch, 5))
        if how == "longest first":
            return [tree for _, _, tree in microbatches(batch, batch, one)]
        return [batch]

    whole, own = batches[0], batches[1]
    for wanted, *shares in zip(parts(whole), *map(parts, own), strict=True):
        rows = (list(microbatches(x.row_ids, x, cut)) for x in (wanted, *shares))
        for (_, expected, _), *found in zip(*rows, strict=True):
            known = np.stack([x.routes.known for _, x, _ in found])
            assert known.dtype == np.uint8
            np.testing.assert_array_equal(known.sum(0, dtype=np.uint8), expected.routes)
            assert ((known > 0).sum(0) <= 1).all()


def test_a_process_holds_its_own_experts_alone(batches):
    """2 x 2 bytes for each token of each of its trajectories but the last one."""
    held = [sum(x.nbytes for x in batch.routes.sampled.rows) for batch in batches[1]]
    assert held == [4 * (4 + 0 + 2), 4 * (11 + 6), 4 * (1 + 10 + 3)]
    for batch in batches[1]:
        cut = jax.tree.map(lambda x: x[2:6], batch)
        assert cut.routes.sampled is batch.routes.sampled  # no copy


def test_the_checksum_is_that_of_one_process(batches, monkeypatch):
    whole, own = batches
    told = []
    monkeypatch.setattr(routes_module, "allgather", lambda value: told.append(value) or [value])
    for batch in own:
        batch.routes.checksum(12)
    assert [sorted(x) for x in told] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    monkeypatch.setattr(routes_module, "allgather", lambda value: told)
    assert own[1].routes.checksum(12) == zlib.crc32(whole.routes.tobytes())


def test_an_empty_batch_of_a_job_is_known_by_its_first_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        batch = empty_batch(4, 8, routes=np.ones((2, 2), np.uint8))
        ((_, rows, _),) = microbatches((), batch, Microbatching(rows=4, total=4))
        assert rows.routes.known.shape == (4, 8, 2, 2)
        assert rows.routes.known.sum() == (0 if process else 4 * 8 * 2 * 2)


# ---- how they come to be so


def test_what_others_sampled_comes_without_its_experts(monkeypatch):
    """Of two processes, of which the first has sampled three trajectories and the second two."""
    shares = [take_trajectories(sampled_output(), np.array(rows)) for rows in ((0, 1, 2), (3, 4))]
    module, told = "jaxrl.rollout.conversations.across_processes.allgather", []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def found_by(process):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        return sample_across_processes(
            lambda prompts, part: shares[process], range(5), each_samples=True
        )

    monkeypatch.setattr(module, lambda value: told.append(value) or [value])
    for process in (0, 1):
        found_by(process)
    assert not any(ROUTES in output for output, *_ in told)
    monkeypatch.setattr(module, lambda value: told)
    for process, held in enumerate(([4, 0, 2, 0, 0], [0, 0, 0, 11, 6])):
        found = found_by(process)
        assert found["response_ids"] == sampled_output()["response_ids"][:5]
        assert found[ROUTES_PROCESS] == [0, 0, 0, 1, 1]
        assert [len(x) for x in found[ROUTES]] == held


def test_batches_that_are_filtered_and_joined_keep_who_has_them():
    first, second = (of_process(sampled_output(), process) for process in (0, 0))
    some = take_trajectories(first, np.array([6, 0]))
    nothing = {k: v for k, v in second.items() if k not in (ROUTES, ROUTES_PROCESS)}
    joined = concat_outputs([some, take_trajectories(nothing, np.array([1]))])
    assert joined[ROUTES_PROCESS] == [2, 0, 0]
    assert [len(x) for x in joined[ROUTES]] == [0, 4, 0]
    assert joined[ROUTES][2] is NO_ROUTES
