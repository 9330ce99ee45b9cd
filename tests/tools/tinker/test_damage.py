"""A bit of a service's files is another: it is said, and nothing is computed from it."""

import contextlib
import errno
import json
import random
import sqlite3
import time
from collections import Counter

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxrl.files import DamagedFile, FolderError
from jaxrl.rollout.server.errors import ApiError
from jaxrl.tools.tinker import states
from jaxrl.tools.tinker.journal import DONE, FAILED, WAITS, Call, Journal
from jaxrl.tools.tinker.tenants import Tenant
from tests.tools.tinker.serving import client, datum, serving, trainer


def flipped(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def content(path):
    """All that a journal says; None = it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
            db.text_factory = bytes
            names = ("service", "sessions", "models", "samplers", "calls", "checkpoints")
            return [db.execute(f"SELECT * FROM {name}").fetchall() for name in names]
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def test_bits_of_a_journal(tmp_path):
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.belong_to({"max_rank": 8})
    for number in range(12):
        call = Call(f"m:{number}", "owner", "m", number, "optim_step", b"\xff{}" * 800)
        journal.accept(call)
        journal.finish(call.id, DONE, b'{"type": "optim_step"}')
    for _ in range(2):  # the second takes the place of the first
        values = "t://m/a", "owner", "m", "training", "m:3", 7, 1.0, None, "{}"
        journal.rows(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *values
        )
    journal.forget_bodies("m", 5)
    journal.rows("DELETE FROM checkpoints WHERE expires < 0 RETURNING path")
    journal.close()
    Journal(path).close()  # all of that is right
    whole, good, kinds = content(path), path.read_bytes(), Counter()
    for bit in random.Random(0).sample(range(8 * len(good)), 200):
        path.write_bytes(good)
        flipped(path, bit)
        changed = content(path) != whole
        try:
            Journal(path).close()
            refused = False
        except DamagedFile as error:
            refused = True
            assert f"{path} is damaged, " in str(error) and "another tinker.root" in str(error)
        kinds[changed, refused] += 1
        assert refused or not changed, bit
    assert kinds[True, True] > 20 and kinds[False, False] > 50


def tenant():
    pair = {"wq": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((3, 2), "f4")}}
    return Tenant(pair, pair, pair, pair, count=np.int32(3), scale=np.float32(8))


def test_bits_of_a_model(tmp_path):
    path = tmp_path / "models" / "m.safetensors"
    states.write(path, tenant(), states.WHOLE, number=12)
    parts, facts = states.read(path)
    np.testing.assert_equal(parts["adapters"], tenant().adapters)
    assert facts["number"] == states.read_facts(path)["number"] == "12"
    good = path.read_bytes()
    found = 0
    for bit in random.Random(0).sample(range(8 * len(good)), 200):
        path.write_bytes(good)
        flipped(path, bit)
        try:
            again, said = states.read(path)
        except DamagedFile as error:
            found += 1
            assert f"{path} is damaged (" in str(error)
            continue
        assert said == facts, bit
        np.testing.assert_equal(again, parts)
    assert found > 190  # the rest is white space of the header


def test_a_file_of_an_earlier_version_is_read(tmp_path, capsys):
    save_file({"scale": np.ones(1), "adapters/wq/a": np.ones(2)}, tmp_path / "m", {"number": "3"})
    parts, facts = states.read(tmp_path / "m")
    assert facts == {"number": "3"} and parts["adapters"]["wq"]["a"].tolist() == [1, 1]
    path = tmp_path / "journal.db"
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE seals; PRAGMA user_version = 0")
    Journal(path).close()
    assert capsys.readouterr().err.count("begun by an earlier version of jaxrl") == 1
    Journal(path).close()
    assert capsys.readouterr().err == ""


def wait(journal, call, owner):
    for _ in range(600):
        found = journal.answer(call, owner)
        if found is not None and found[1] != WAITS:
            return found[1:]
        time.sleep(0.1)
    raise AssertionError(f"{call} is not answered")


def test_a_damaged_model_costs_nobody_else(tmp_path):
    """Of a model whose file is another every call is answered so, as soon as it is needed."""
    one = datum([1, 2, 3, 4], weights=[1.0] * 3)
    with serving(tmp_path, tinker__snapshot_calls=1) as server, client(server) as service:
        models = [trainer(service, seed=seed) for seed in range(3)]
        for model in models:
            model.forward_backward([one], "cross_entropy").result()
        names = [model.model_id for model in models]
        server.service.end = lambda session: None  # the client goes, its models stay
    tensors, number, whole = (tmp_path / "models" / f"{name}.safetensors" for name in names)
    expected, facts = states.read(whole)
    assert facts["number"] == "1"
    flipped(tensors, 8 * (tensors.stat().st_size - 1))
    before = b'"number":"'
    flipped(number, 8 * (number.read_bytes().index(before) + len(before)))
    with serving(tmp_path, tinker__snapshot_calls=100) as server:
        known, journal = server.service._models, server.service.journal
        assert known[names[1]].damage.startswith(f"{number} is damaged (its checksum is that of an")
        body = b'{"model_id": "x", "seq_id": 2, "adam_params": {"learning_rate": 0.0}}'
        answers = []
        for name in (names[0], names[2]):
            owner = known[name].owner
            server.service.accept(Call(f"{name}:2", owner, name, 2, "optim_step", body))
            answers.append(wait(journal, f"{name}:2", owner))
        (failed, said), (done, _) = answers
        assert failed == FAILED and f"{tensors} is damaged (the checksum of its tensors" in str(
            said
        )
        assert done == DONE
        for name in names[:2]:
            with pytest.raises(ApiError, match="is damaged"):
                server.service.model(name, owner)
        again = server.service.tenants.take(known[names[2]].slot)
        np.testing.assert_equal(again.adapters, expected["adapters"])


def test_a_disk_that_cannot_be_written_is_no_fault_of_the_client(tmp_path, monkeypatch, caplog):
    """It is the server's, as is the path, which its log names."""
    full = "I/O error: No space left on device (os error 28)"
    errors = [SafetensorError(full), OSError(errno.EROFS, "Read-only file system")]

    def write(*args, **kwargs):
        raise errors.pop(0)

    answers = []
    with serving(tmp_path) as server, client(server) as service:
        name = trainer(service).model_id
        owner = server.service._models[name].owner
        body = b'{"model_id": "x", "seq_id": 1, "path": "a"}'
        monkeypatch.setattr(states, "save_file", write)
        for number in (1, 2):
            call = f"{name}:{number}"
            server.service.accept(Call(call, owner, name, number, "save_weights", body))
            answers.append(wait(server.service.journal, call, owner))
        monkeypatch.undo()
        server.service.accept(Call(f"{name}:3", owner, name, 3, "save_weights", body))
        assert wait(server.service.journal, f"{name}:3", owner)[0] == DONE
        sample = Call("s", owner, "none", 1, "sample", b"{}")
        server.service.journal.accept(sample)
        server.service._sampled(sample, FolderError(f"cannot write {tmp_path}"))
        answers.append(wait(server.service.journal, "s", owner))
    for state, answer in answers:
        assert (state, json.loads(answer)["category"]) == (FAILED, "server")
        assert "cannot write" in answer.decode() and str(tmp_path) not in answer.decode()
    for reason in (full, "Read-only file system"):
        assert f"a.safetensors ({reason}): free space on its disk" in caplog.text


def test_calls_that_a_journal_lost_are_missed(tmp_path):
    """A disk lost what it had reported as written; the file of the model has it."""
    with serving(tmp_path, tinker__snapshot_calls=1) as server, client(server) as service:
        model = trainer(service)
        model.forward_backward([datum([1, 2], weights=[1.0])], "cross_entropy").result()
        server.service.end = lambda session: None
    journal = Journal(tmp_path / "journal.db")
    journal.rows("DELETE FROM calls WHERE target = ? AND number = 1", model.model_id)
    journal.close()
    with serving(tmp_path) as server:
        damage = server.service._models[model.model_id].damage
        assert "has the call 1, and the journal ends with 0: calls are lost" in damage
