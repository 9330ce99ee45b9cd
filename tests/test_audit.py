"""The audit finds what is wrong with a run, and nothing wrong with one that is right."""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxrl.audit import audit, main, report
from jaxrl.data.prompts import epoch_order
from jaxrl.ledger import FILE, Ledger
from jaxrl.lineage_checks import sign_flip_p
from jaxrl.train import BasePPOExp, train
from jaxrl.trainer import Trainer
from tests.test_train import ROOT, small

SIZE, SAMPLES, PROMPTS, SEED = 2, 2, 5, 7  # an epoch is two batches, a prompt is left out
FACTS = {"seed": SEED, "train_batch_size": SIZE, "num_prompts": PROMPTS, "samples": SAMPLES}
UIDS = [f"0:{row}" for row in range(PROMPTS)]


def uid(ordinal):
    epoch, place = divmod(ordinal, 4)
    return UIDS[epoch_order(PROMPTS, SEED, epoch)[place]]


class Scribe:
    """Writes a ledger as a trainer does, one call for each thing that happens."""

    def __init__(self, folder, schedule="sync"):
        self.folder = folder
        asynchronous = {"enabled": schedule != "sync", "schedule": schedule}
        settings = {"ckpt_path": str(folder / "checkpoints"), "fully_async": asynchronous}
        (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": settings}))

    def begin(self, step=0, saved=None, first=0, held=()):
        self.ledger = Ledger(self.folder / FILE)
        given = {"first_ordinal": first, "facts": FACTS, "uids": UIDS, "held": held}
        self.ledger.begin(step, saved, **given)

    def hand_out(self, step, *ordinals):
        groups = self.ledger.add("groups", [(k, uid(k), step) for k in ordinals])
        return dict(zip(ordinals, groups, strict=True))

    def sampled(self, *groups, tokens=4):
        rows = [(g, s, 1.0, tokens, "stop", 0, 0) for g in groups for s in range(SAMPLES)]
        return self.ledger.add("trajectories", rows)

    def end_step(self, step, trajectories):
        self.ledger.add("ends", [(i, step, None) for i in trajectories])
        self.ledger.add("steps", [(step, None, None, "{}")])

    def step(self, step, tokens=4):
        """A synchronous one."""
        groups = self.hand_out(step - 1, *range((step - 1) * SIZE, step * SIZE))
        self.end_step(step, self.sampled(*groups.values(), tokens=tokens))

    def checks(self):
        self.ledger.submit(lambda db: None).result()
        return {check.name: check for check in audit(self.folder)}


def failed(checks):
    return {name: check.failures for name, check in checks.items() if check.failures}


@pytest.fixture
def scribe(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    yield scribe
    scribe.ledger.close()


# ------------------------------------------------------------------ what is right


def test_a_synchronous_run_that_crashed_twice(scribe):
    scribe.step(1)
    saved = scribe.ledger.position()
    scribe.step(2, tokens=6)
    scribe.hand_out(2, 4, 5)  # step 3 was being sampled
    assert not failed(scribe.checks())
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    checks = scribe.checks()  # killed again before it handed out anything
    assert not failed(checks)
    assert checks["no prompt skipped"].figures["to be handed out again"] == 4
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    scribe.step(2, tokens=6)
    scribe.step(3)
    checks = scribe.checks()
    assert not failed(checks)
    figures = {name: check.figures for name, check in checks.items()}
    assert figures["history"] == {"attempts": 3, "resumed": 2, "finished steps": 3}
    assert figures["no prompt skipped"] == {
        "handed out": 6,
        "from": 0,
        "skipped": 0,
        "twice": 0,
        "to be handed out again": 0,
    }
    assert figures["in flight"]["at crashes"] == 2
    assert figures["in flight"]["of these handed out again"] == 2
    assert figures["none trained twice"] == {"trained": 12, "twice": 0}
    assert figures["steps"] == {"finished": 3, "done again after a crash": 1}
    assert figures["no length bias"]["thrown away"] == 4
    assert figures["no length bias"]["p"] == "1.0000"
    assert checks["recorded rollouts"].result == "unknown"


def test_a_free_run_that_crashed_with_prompts_in_flight_and_in_the_buffer(tmp_path):
    scribe = Scribe(tmp_path, "free")
    scribe.begin()
    groups = scribe.hand_out(0, 0, 1, 2, 3)
    done = {k: scribe.sampled(groups[k]) for k in (0, 2, 3)}  # 1 is slow
    scribe.end_step(1, done[0] + done[2])
    saved = scribe.ledger.position()  # 3 is in its buffer, 1 in flight
    groups |= scribe.hand_out(1, 4, 5)
    scribe.end_step(2, done[3] + scribe.sampled(groups[4]))
    checks = scribe.checks()
    assert not failed(checks)
    assert checks["in flight"].figures["in flight now"] == "2 (1, 5)"
    scribe.ledger.close()
    scribe.begin(1, saved, first=4, held=[groups[3]])
    checks = scribe.checks()
    assert not failed(checks)
    assert checks["no prompt skipped"].figures["to be handed out again"] == 3  # 1, 4, 5
    assert checks["in flight"].figures["sampled, not trained"] == "1 (3)"
    again = scribe.hand_out(1, 1, 4)
    scribe.end_step(2, done[3] + scribe.sampled(again[4]))
    assert not failed(scribe.checks())
    scribe.ledger.close()


def test_a_run_that_knows_nothing_of_its_first_steps(tmp_path):
    foreign, own = str(tmp_path / "other" / "global_step_1"), tmp_path / "checkpoints/global_step_1"
    for number, (origin, result) in enumerate([(foreign, "unknown"), (str(own), "FAILED")]):
        (tmp_path / str(number)).mkdir()
        scribe = Scribe(tmp_path / str(number))
        settings = {"trainer": {"ckpt_path": str(tmp_path / "checkpoints")}}
        (scribe.folder / "config.yaml").write_text(yaml.safe_dump(settings))
        scribe.begin(1, {"run_id": "another", "position": 3, "path": origin}, first=2)
        scribe.step(2)
        checks = scribe.checks()
        assert checks["history"].result == result
        (text,) = [*checks["history"].failures, *filter(None, [checks["history"].unknown])]
        assert "steps 1 to 1 ended is not in this ledger" in text and origin in text
        assert set(failed(checks)) <= {"history"}
        scribe.ledger.close()
