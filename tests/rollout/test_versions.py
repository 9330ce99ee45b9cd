"""Versions of weights in folders and buckets: what is written, read, and refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from jaxrl import config as cfg
from jaxrl.files import FolderError, sealed, unsealed
from jaxrl.rollout import build_remote
from jaxrl.rollout.weights import versions
from jaxrl.rollout.weights.groups import named
from jaxrl.rollout.weights.version_folder import VersionFolder
from jaxrl.rollout.weights.version_reader import VersionReader
from jaxrl.rollout.weights.versions import Index, VersionDamaged
from tests.rollout.buckets import empty_bucket
from tests.test_train import small

BF16 = ml_dtypes.bfloat16
GROUP_BYTES = 64  # of 40 + 24 + 8: three files
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def params(*, w=None, embed=None):
    """[2, 3, 2] in a stack, [5, 4] and a norm that stays float32; changes by place -> value."""
    arrays = {
        "embed": np.arange(20, dtype=BF16).reshape(5, 4),
        "final_norm": np.array([1.0, 2.0], np.float32),
        "layers": {"w": np.arange(12, dtype=BF16).reshape(2, 3, 2)},
    }
    for array, made in ((arrays["embed"], embed), (arrays["layers"]["w"], w)):
        for place, value in (made or {}).items():
            array.reshape(-1)[place] = value
    return jax.device_put(arrays, ONE)


FIRST = params()
SECOND = params(w={5: np.nan}, embed={0: -0.0, 7: np.inf})
THIRD = params(w={5: 0.5}, embed={0: -0.0, 7: np.inf})


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path, monkeypatch):
    top = tmp_path if request.param == "disk" else empty_bucket(monkeypatch)
    return epath.Path(f"{top}/weights")


def folder_of(root, *, delta=True):
    return VersionFolder(root, jnp.bfloat16, GROUP_BYTES, delta=delta)


def reader():
    return VersionReader(FIRST, jax.tree.map(lambda _: ONE, FIRST))


def at(root, version):
    return versions.version_folder(root, version)


def bits(tree):
    return {name: np.asarray(x).tobytes() for name, x in named(tree).items()}


def published(root, *some, delta=True):
    """Versions 1, 2 and so on."""
    end = folder_of(root, delta=delta)
    for version, weights in enumerate(some, 1):
        assert end.publish(weights, version) == str(at(root, version) / "index.json")
    return end


def reads(monkeypatch):
    """The folders whose files, other than the index, are read from now on."""
    found, content = [], versions._content

    def noted(path):
        if path.name != versions.INDEX:
            found.append(path.parent.name)
        return content(path)

    monkeypatch.setattr(versions, "_content", noted)
    return found


def test_a_version_is_places_and_values_of_what_changed(root):
    end = published(root, FIRST)
    assert end.written_bytes == 2 * 20 + 2 * 12 + 4 * 2
    end.publish(SECOND, 2)
    assert end.written_bytes == 3 * (4 + 2)
    index = Index.read(at(root, 2))
    assert (index.version, index.base, index.dtype, index.keep) == (2, 1, "bfloat16", True)
    stored = [sorted(file.stored) for file in index.files]
    assert stored == [
        ["0 embed places", "0 embed values", "1 final_norm places", "1 final_norm values"],
        ["0 layers/w places", "0 layers/w values"],
    ]
    assert sorted(Index.read(at(root, 1)).files[0].stored) == ["0 embed", "1 final_norm"]


def test_what_is_read_is_what_was_written_to_the_bit(root, monkeypatch):
    """NaN, -0 and infinity; a chain of three, one by one and for who comes later."""
    end, server, found = published(root, FIRST), reader(), reads(monkeypatch)
    first = server.read(at(root, 1))
    assert bits(first) == bits(FIRST)
    end.publish(SECOND, 2)
    second = server.read(at(root, 2))
    assert bits(second) == bits(SECOND)
    assert np.signbit(np.asarray(second["embed"], np.float32)[0, 0])
    assert np.isnan(np.asarray(second["layers"]["w"], np.float32)[0, 2, 1])
    end.publish(THIRD, 3)
    assert bits(server.read(at(root, 3))) == bits(THIRD)
    assert bits(first) == bits(FIRST) and bits(second) == bits(SECOND)  # nothing is written over
    assert found == ["version-1"] * 2 + ["version-2"] * 2 + ["version-3"] * 2
    found.clear()
    assert bits(reader().read(at(root, 3))) == bits(THIRD)
    assert found == ["version-1"] * 2 + ["version-2"] * 2 + ["version-3"] * 2
    found.clear()
    assert bits(server.read(at(root, 3))) == bits(THIRD)  # as after a sleep
    assert found == []


def test_weights_go_to_where_the_server_has_them(tmp_path):
    """Each array over two devices along its last dim."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")

    def spread(x):
        spec = jax.sharding.PartitionSpec(*[None] * (x.ndim - 1), "x")
        return jax.sharding.NamedSharding(mesh, spec)

    places = jax.tree.map(spread, FIRST)
    published(root := epath.Path(tmp_path), FIRST, SECOND)
    found = VersionReader(FIRST, places).read(at(root, 2))
    assert bits(found) == bits(SECOND)
    assert jax.tree.map(lambda x: x.sharding, found) == places


def test_a_config_that_asks_for_changes_gets_them(root, tmp_path):
    config = small(
        tmp_path,
        **{
            "generator.inference_engine.run_engines_locally": False,
            "generator.inference_engine.remote_urls": ["http://a:1"],
            "generator.inference_engine.model_dtype": "bfloat16",
            "generator.inference_engine.weight_delta": True,
            "generator.inference_engine.weights_folder": str(root),
        },
    )
    source = build_remote._source(cfg.resolve(config), None, None, None)  # pyright: ignore
    assert isinstance(source, VersionFolder) and source.delta
    assert (source.root, source.dtype, root.exists()) == (root, jnp.bfloat16, True)


def test_a_server_that_missed_one_reads_both(root, monkeypatch):
    end, server = published(root, FIRST), reader()
    server.read(at(root, 1))
    end.publish(SECOND, 2)
    end.publish(THIRD, 3)
    found = reads(monkeypatch)
    assert bits(server.read(at(root, 3))) == bits(THIRD)
    assert found == ["version-2"] * 2 + ["version-3"] * 2


def test_what_is_not_less_is_whole(root):
    """All weights change; then the chain gets longer than the whole, of 72 bytes."""
    end = published(root, FIRST)
    end.publish(jax.tree.map(lambda x: x + 1, FIRST), 2)
    assert Index.read(at(root, 2)).base is None and end.written_bytes == 72
    bases = []
    for version in range(3, 10):
        end.publish(params(w=dict.fromkeys(range(3), version)), version)
        bases.append(Index.read(at(root, version)).base)
    # the first differs from version 2 everywhere; then 3 changes of 6 bytes: 18, 36, 54, 72, 90
    assert bases == [None, 3, 4, 5, 6, None, 8]
    again = folder_of(root)  # the trainer was started again
    again.publish(SECOND, 10)
    assert Index.read(at(root, 10)).base is None
    again.publish(FIRST, 9)  # and went back
    assert Index.read(at(root, 9)).base is None


def test_without_delta_all_is_whole_and_nothing_is_kept(root):
    end, server = published(root, FIRST, FIRST, delta=False), reader()
    assert Index.read(at(root, 2)).base is None and end.written_bytes == 72
    assert bits(server.read(at(root, 2))) == bits(FIRST)
    assert server._kept is None and not end._share._held


def test_versions_that_others_stand_on_stay(root):
    end = published(root, FIRST, SECOND, THIRD)
    (root / "base").mkdir()
    (root / "base" / "x").write_text("")
    end.keep_only(3)
    assert bits(reader().read(at(root, 3))) == bits(THIRD)
    assert end._mend(3) and Index.read(at(root, 3)).base is None
    end.keep_only(3)
    assert sorted(path.name for path in root.iterdir()) == ["base", "version-3"]
    assert bits(reader().read(at(root, 3))) == bits(THIRD)


def test_the_same_version_of_other_weights_is_whole(root):
    """As after a trainer has gone back to its checkpoint."""
    end, server = published(root, FIRST), reader()
    server.read(at(root, 1))
    end.publish(SECOND, 1)
    assert Index.read(at(root, 1)).base is None
    assert bits(server.read(at(root, 1))) == bits(SECOND)


# ---- what is damaged


def first_file(folder):
    return folder / Index.read(folder).files[0].name


def corrupt(folder):
    path = first_file(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of a value of embed
    path.write_bytes(bytes(content))


def cut(folder):
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-2])


def lose(folder):
    first_file(folder).unlink()


def lose_index(folder):
    (folder / versions.INDEX).unlink()


def cut_index(folder):
    text = (folder / versions.INDEX).read_text()
    (folder / versions.INDEX).write_text(text[: len(text) // 2])


def changed_index(folder, **changes):
    index, _ = unsealed((folder / versions.INDEX).read_text())
    (folder / versions.INDEX).write_text(json.dumps(sealed(index | changes)))


DAMAGES = [
    (corrupt, r"version-3/\w+-00000.safetensors has other bits than .*: tensors 0 embed values"),
    (cut, r"version-3/\w+-00000.safetensors is cut off, or damaged"),
    (lose, r"version-3/\w+-00000.safetensors is missing"),
    (lose_index, "version-3/index.json is missing"),
    (cut_index, "version-3/index.json is no index of weights"),
    (lambda folder: changed_index(folder, format=2), "format=2, and this jaxrl reads 1"),
    (lambda folder: changed_index(folder, base=3), "version=3, base=3"),
    (lambda folder: changed_index(folder, files=[{}]), "no index of weights .*KeyError"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_version_is_named_and_read_when_it_is_whole_again(root, damage, message):
    end, server = published(root, FIRST, SECOND), reader()
    held = server.read(at(root, 2))
    end.publish(params(w={5: 0.5}, embed={19: 3.0}), 3)
    damage(at(root, 3))
    with pytest.raises(VersionDamaged, match=f"{message}.*the trainer then writes the version"):
        server.read(at(root, 3))
    assert bits(held) == bits(SECOND)
    assert end._mend(3)
    assert bits(server.read(at(root, 3))) == bits(params(w={5: 0.5}, embed={19: 3.0}))


@pytest.mark.parametrize("damage", [corrupt, cut, lose, lose_index])
def test_a_chain_is_as_good_as_its_parts(root, damage):
    """Who has version 2 needs nothing of it; others do, until the trainer writes 3 whole."""
    end, one, other = published(root, FIRST, SECOND), reader(), reader()
    one.read(at(root, 2))
    other.read(at(root, 1))
    end.publish(THIRD, 3)
    damage(at(root, 2))
    assert bits(one.read(at(root, 3))) == bits(THIRD)
    for server in (other, reader()):
        with pytest.raises(VersionDamaged, match="version-2/"):
            server.read(at(root, 3))
    assert end._mend(3)
    assert bits(other.read(at(root, 3))) == bits(THIRD)


def test_changes_of_another_version_are_found_by_the_whole(root):
    """Those of 2 to 3 for who has 1: places and values are right, the whole is not."""
    published(root, FIRST, params(embed={3: 9.0}), params(embed={3: 9.0, 4: 9.0}))
    server = reader()
    server.read(at(root, 1))
    changed_index(at(root, 3), base=1)
    wrong = r"changes of version 1\) does not give version 3: other bits in embed; "
    with pytest.raises(VersionDamaged, match=wrong):
        server.read(at(root, 3))


def test_a_server_with_other_weights_of_that_number_reads_the_whole(root, caplog):
    """They are of another trainer, or of this one before it went back."""
    folder_of(root / "other").publish(params(embed={8: 7.0}), 1)
    server = reader()
    server.read(at(root / "other", 1))
    published(root, FIRST, SECOND)
    with caplog.at_level("WARNING"):
        assert bits(server.read(at(root, 2))) == bits(SECOND)
    assert "does not give version 2: other bits in embed" in caplog.text


def test_another_model_is_no_damage(root):
    published(root, FIRST)
    other = {"embed": FIRST["embed"]}
    with pytest.raises(ValueError, match="final_norm is none of this model's arrays"):
        VersionReader(other, {"embed": ONE}).read(at(root, 1))


def test_any_digit_of_an_index_that_flips_is_damage(tmp_path):
    root = epath.Path(tmp_path / "weights")
    published(root, FIRST, SECOND)
    path = at(root, 2) / "index.json"
    text = path.read_text()
    whole = Index.read(at(root, 2))
    for place in (i for i, sign in enumerate(text) if sign.isdigit()):
        path.write_text(f"{text[:place]}{int(text[place]) ^ 1}{text[place + 1 :]}")
        with pytest.raises(VersionDamaged, match="version-2/index.json is no index of weights"):
            Index.read(at(root, 2))
    old, _ = unsealed(text)
    path.write_text(json.dumps(old))  # of a trainer of an earlier version
    assert Index.read(at(root, 2)) == whole


def test_links_are_not_followed(tmp_path):
    root = epath.Path(tmp_path / "weights")
    published(root, FIRST)
    path = first_file(at(root, 1))
    path.rename(tmp_path / "elsewhere")
    (tmp_path / "weights" / "version-1" / path.name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VersionDamaged, match="cannot be read .*it is a link"):
        reader().read(at(root, 1))


@pytest.mark.parametrize("failing", ["00001.safetensors", "index.json"])
def test_a_version_that_could_not_be_written_is_not_there(root, monkeypatch, failing):
    end, server = published(root, FIRST, SECOND), reader()
    with monkeypatch.context() as patch:
        for name in ("write_bytes", "write_text"):
            right = getattr(type(root), name)

            def full(path, *args, right=right, **more):
                if str(path).endswith(failing):
                    raise OSError(28, "No space left on device")
                return right(path, *args, **more)

            patch.setattr(type(root), name, full)
        for version in (2, 3):
            with pytest.raises(FolderError, match="No space left on device"):
                end.publish(THIRD, version)
    assert bits(server.read(at(root, 2))) == bits(SECOND)
    with pytest.raises(VersionDamaged, match="version-3/index.json is missing"):
        server.read(at(root, 3))
    end.publish(THIRD, 3)
    assert Index.read(at(root, 3)).base is None
    assert bits(server.read(at(root, 3))) == bits(THIRD)
