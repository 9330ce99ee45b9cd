"""What one process offers of the trainer's weights: boxes of its own devices."""

import threading
from multiprocessing import Pipe

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.models.linear import LoraWeight, merge
from jaxrl.rollout.weights.groups import Piece, named, plan, whole_pieces
from jaxrl.rollout.weights.share import Gone, Share, Shares, SharingEngine, _take_here, boxes
from jaxrl.rollout.weights.transfer import WeightTransfer

MESH = Mesh(np.reshape(jax.devices(), (4, 2)), ("fsdp", "tensor"))


def spread(x, *names):
    return jax.device_put(np.asarray(x, np.float32), NamedSharding(MESH, PartitionSpec(*names)))


def params(adapter):
    """Two arrays of a model: w [L, D, H, h] over both axes, embed over one, norm over none."""
    rng = np.random.default_rng(0)
    w = spread(rng.standard_normal((3, 8, 4, 5)), None, "fsdp", "tensor")
    if adapter:
        a, b = rng.standard_normal((3, 8, 2)), rng.standard_normal((3, 2, 4, 5))
        w = LoraWeight(w, spread(a), spread(b), spread([0.5, 2.0, 1.5]))
    embed = spread(rng.standard_normal((12, 8)), "fsdp")
    return {"embed": embed, "layers": {"w": w}, "norm": spread(rng.standard_normal(8))}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("group_bytes", [200, 10**6])
def test_boxes_of_all_devices_are_the_whole(adapter, group_bytes):
    """Each box is cut from one shard, merged and cast there."""
    arrays = named(params(adapter))
    found = {name: np.full(np.shape(merge(x)), np.nan) for name, x in arrays.items()}
    for group in plan(whole_pieces(arrays, "bfloat16"), group_bytes):
        for piece in boxes(arrays, group)[0]:
            assert np.isnan(found[piece.name][piece.box]).all()  # nothing comes twice
            found[piece.name][piece.box] = _take_here(arrays[piece.name], piece)
    for name, x in arrays.items():
        wanted = np.asarray(merge(x).astype("bfloat16"), np.float32)
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_an_adapter_with_a_scale_of_numpy_is_offered():
    """As the trainer's parameters are in one process; and so are they where it is gone."""
    weights = params(True)
    layer = weights["layers"]["w"]
    weights["layers"]["w"] = layer.replace(scale=np.float32([0.5, 2.0, 1.5]))
    end = WeightTransfer(np.float32)
    offer = end.publish(weights, 3)
    group = offer.groups[1]  # the stacked arrays
    (found,) = end.shares.offer(3, 1, group, [("127.0.0.1", 5)], None)
    assert found.nbytes == 4 * 3 * 8 * 4 * 5
    layer.w.delete()
    end.shares.own._cut = None
    with pytest.raises(Gone, match="the trainer is at work"):
        end.shares.offer(3, 1, group, [("127.0.0.1", 6)], None)


def test_what_is_cut_where():
    """embed [12, 8] over four: 3 rows each; a piece of rows 2 to 8 meets three of them."""
    arrays = named(params(False))
    (of_process,) = boxes(arrays, [Piece("embed", (2, 0), (6, 8), "float32")]).values()
    assert [(p.starts, p.shape) for p in of_process] == [
        ((2, 0), (1, 8)),
        ((3, 0), (3, 8)),
        ((6, 0), (2, 8)),
    ]


def test_another_process_offers_what_it_is_asked_for_until_the_phase_ends():
    ours, theirs = Pipe()
    shares = Shares(Share(delta=False), {1: ours})
    scored, piece = [], Piece("norm", (0,), (8,), "float32")
    engine = SharingEngine(Share(delta=False), theirs, lambda params, *args: scored.append(args))
    with pytest.raises(Gone, match="the trainer is at work"):
        shares.offer(3, 0, {1: [piece]}, [("127.0.0.1", 5)], None)
    follower = threading.Thread(target=engine.update_weights, args=(params(False), 3))
    follower.start()
    with shares.phase():
        (offered,) = shares.offer(3, 0, {1: [piece]}, [("127.0.0.1", 5)], None)
        assert offered.nbytes == 8 * 4 and offered.changed == (None,)
        assert offered.addresses[0].startswith("127.0.0.1:")
        with pytest.raises(Gone, match="version 4 is not held, but 3"):
            shares.offer(4, 0, {1: [piece]}, [("127.0.0.1", 6)], None)
        assert shares.score(lambda params, *args: (params, args), "ours", [1, 2], 1) == (
            "ours",
            ([1, 2], 1),
        )
    follower.join(timeout=30)
    assert not follower.is_alive() and scored == [([1, 2], 1)]
    with pytest.raises(Gone):
        shares.offer(3, 0, {1: [piece]}, [("127.0.0.1", 5)], None)
    engine.sleep()
