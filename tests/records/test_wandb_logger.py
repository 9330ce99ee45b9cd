"""Weights & Biases with the real package, offline; `pip install 'jaxrl[wandb]'`."""

import pytest

from jaxrl.records.run_logger import RunLogger

wandb = pytest.importorskip("wandb")


def write_run(folder, steps, *, finished=0):
    logger = RunLogger(
        folder, ["wandb"], finished, config={"seed": 1}, project="sums", run_name="first"
    )
    for step in steps:
        logger.log(step, {"reward/avg_raw_reward": step / 2})
    logger.close()


def records(data):
    """Of a file in LevelDB's log format: blocks of 32 KiB; checksum, length and kind first."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def history(folder):
    """Run id, and steps with their rewards, of each offline run."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        name, rows = None, []
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                name = record.run.run_id, record.run.project, record.run.display_name
            if record.HasField("history"):
                items = {i.nested_key[0] if i.nested_key else i.key: i for i in record.history.item}
                reward = items["reward/avg_raw_reward"].value_json
                rows.append((record.history.step.num, float(reward)))
        yield name, rows


def test_offline_runs_are_recorded_and_resumed_under_their_id(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path, [1, 2, 3])
    write_run(tmp_path, [3, 4], finished=2)  # the server drops what it has: step 3
    (first, rows), (second, more) = history(tmp_path)
    assert first == second
    assert first[1:] == ("sums", "first")
    assert first[0] == (tmp_path / "wandb_run_id.txt").read_text().strip()
    assert rows == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert more == [(3, 1.5), (4, 2.0)]
    assert "failed" not in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "0" * 40])
def test_without_a_key_or_a_server_the_run_is_recorded_offline(tmp_path, monkeypatch, capsys, key):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.setattr("jaxrl.records.loggers.INIT_SECONDS", 3.0)
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    write_run(tmp_path / "run", [1, 2])
    ((_, rows),) = history(tmp_path / "run")
    assert rows == [(1, 0.5), (2, 1.0)]
    said = capsys.readouterr().err
    assert said.count("`wandb sync` that folder later") == 1
    assert "failed" not in said
