"""Ledgers for tests: what a trainer would write, one call for each thing that happens."""

import yaml

from jaxrl.audit import audit
from jaxrl.data.order import DataOrder
from jaxrl.records.ledger import FILE, Ledger

SIZE, SAMPLES, PROMPTS, SEED = 2, 2, 5, 7  # an epoch is two batches, a prompt is left out
FACTS = {"seed": SEED, "train_batch_size": SIZE, "num_prompts": PROMPTS, "samples": SAMPLES}
UIDS = [f"0:{row}" for row in range(PROMPTS)]


def uid(ordinal):
    batch, place = divmod(ordinal, SIZE)
    return UIDS[DataOrder((PROMPTS,), (SIZE,), SEED).batch(batch)[place]]


class Scribe:
    """Writes a ledger as a trainer does, one call for each thing that happens."""

    def __init__(self, folder, schedule="sync"):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        asynchronous = {"enabled": schedule != "sync", "schedule": schedule}
        settings = {"ckpt_path": str(folder / "checkpoints"), "fully_async": asynchronous}
        (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": settings}))

    def begin(self, step=0, saved=None, first=0, lock_timeout=60.0, **given):
        self.ledger = Ledger(self.folder / FILE, lock_timeout=lock_timeout)
        known = {"first_ordinal": first, "facts": FACTS, "machine": {}, "uids": UIDS}
        self.ledger.begin(step, saved, **known, **given)

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
    """Those that failed, with what they say."""
    return {name: check.failures for name, check in checks.items() if check.failures}
