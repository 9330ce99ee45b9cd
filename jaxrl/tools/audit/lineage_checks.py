"""Check what has to be true of a run's ledger, by a function for each row of the audit's table.

"Crash" is any end of an attempt that left rows to take back: a kill, an error, a full disk.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.data.recorded import file_digest, routes_elsewhere
from jaxrl.files import as_path
from jaxrl.records.checkpoint_folders import PREFIX, read_metadata
from jaxrl.records.ledger import FILE
from jaxrl.tools.audit.lineage import REMEDY, TABLES, AuditedRun

BIASED = 1e-3  # p below which lengths differ
FLIPS = 10_000
EXACT = 13  # differences up to which all sign flips are counted


@dataclass
class Check:
    """Hold one row of the audit's table.

    Attributes:
        figures: what was counted.
        failures: what is wrong, a line each.
        unknown: what this run cannot know, in words.
    """

    name: str
    figures: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    unknown: str = ""

    @property
    def result(self) -> str:
        """Return "FAILED", "unknown" or "passed"."""
        return "FAILED" if self.failures else "unknown" if self.unknown else "passed"


def history(run: AuditedRun) -> Check:
    """Check that the ledger knows the run from its first step.

    A run may begin with the checkpoint of another run, whose ledger has the steps before; but one
    that goes on from its own checkpoint without having its rows has lost them.
    """
    (attempts,) = run.rows("SELECT COUNT(*), SUM(position > 0) FROM attempts")
    figures = {"attempts": attempts[0], "resumed": attempts[1], "finished steps": run.last_step}
    if not run.origin:
        return Check("history", figures)
    text = (
        f"attempt {run.attempt} went on from {run.origin}: where the prompts of its steps, "
        f"1 to {run.from_step}, ended is not in this ledger"
    )
    checkpoint, _, _ = run.origin.rpartition(" of run ")
    if as_path("origin", checkpoint).parent == run.checkpoint_folder:
        return Check("history", figures, failures=[text])
    return Check("history", figures, unknown=text)


def prompts(run: AuditedRun) -> Check:
    """Check that prompts are handed out in the order of the data, none skipped, each once.

    What a crash took back and nobody has come to again is not skipped yet: it is as soon as a
    later attempt hands out what comes after it. Each engine of an asynchronous job hands out its
    share of the prompts, as fast as it samples.
    """
    groups = run.pairs("SELECT ordinal, attempt FROM live_groups ORDER BY ordinal, id")
    ordinals, attempts = groups.T
    distinct, counts = np.unique(ordinals, return_counts=True)
    first, size = run.first_ordinal, run.facts["train_batch_size"]
    taken_back = dict(
        run.rows(
            "SELECT ordinal, MIN(MAX(superseded), (SELECT MAX(attempt) FROM attempts)) "
            "FROM groups WHERE superseded > 0 GROUP BY 1"
        )
    )
    skipped = []
    for share in run.shares:
        of_share = np.isin(ordinals % size, share)
        here, by = ordinals[of_share], attempts[of_share]
        every = np.arange(first, int(max(here, default=first - 1)) + 1)
        missing = np.setdiff1d(every[np.isin(every % size, share)], distinct)
        latest_after = np.maximum.accumulate(by[::-1])[::-1]  # attempt of any that comes later
        after = latest_after[np.searchsorted(here, missing)]
        pairs = zip(missing.tolist(), after, strict=True)
        skipped += [k for k, at in pairs if at >= taken_back.get(k, 0)]
    skipped.sort()
    waiting = set(taken_back) - set(ordinals.tolist()) - set(skipped)
    waiting = {k for k in waiting if k >= first}
    figures = {
        "handed out": len(distinct),
        "from": first,
        "skipped": len(skipped),
        "twice": int((counts > 1).sum()),
        "to be handed out again": len(waiting),
    }
    failures = _prompts_named(run, skipped, "was skipped")
    failures += _prompts_named(run, distinct[counts > 1].tolist(), "was handed out twice")
    # else they were under way in the checkpoint of another ledger
    if run.schedule == "sync" and not run.facts.get("carries"):
        failures += _prompts_named(run, ordinals[ordinals < first].tolist(), "is before the first")
    return Check("no prompt skipped", figures, failures)


def order(run: AuditedRun) -> Check:
    """Check that each prompt is the one that the order of the data has at its place."""
    groups = run.rows("SELECT ordinal, uid FROM live_groups ORDER BY ordinal")
    if run.facts.get("own_order"):
        text = "the run's trainer chooses its prompts by a next_prompts or prompts_of of its own"
        return Check("order of the data", {"prompts": len(groups)}, unknown=text)
    if len(run.data) != run.facts["num_prompts"]:
        return Check("order of the data", {}, [f"{len(run.data)} prompts are listed in the data"])
    expected = run.uids(np.array([k for k, _ in groups], np.int64))
    wrong = [
        f"prompt {k} is {uid}, the order of the data has {right}"
        for (k, uid), right in zip(groups, expected, strict=True)
        if uid != right
    ]
    return Check("order of the data", {"prompts": len(groups), "wrong": len(wrong)}, wrong)


def in_flight(run: AuditedRun) -> Check:
    """Check that prompts in flight at a crash are sampled again; list those of now."""
    crashed = run.rows(
        "SELECT g.ordinal, g.ordinal IN (SELECT ordinal FROM live_groups) "
        "FROM groups g WHERE superseded > 0 AND g.ordinal >= ? "
        "AND NOT EXISTS (SELECT 1 FROM trajectories t WHERE t.group_id = g.id) GROUP BY 1",
        run.first_ordinal,
    )
    now = run.rows(
        "SELECT ordinal, attempt FROM live_groups g "
        "WHERE NOT EXISTS (SELECT 1 FROM live_trajectories t WHERE t.group_id = g.id)"
    )
    waiting = run.rows(
        "SELECT DISTINCT g.ordinal FROM live_groups g JOIN live_trajectories t "
        "ON t.group_id = g.id "
        "WHERE NOT EXISTS (SELECT 1 FROM live_ends e WHERE e.trajectory_id = t.id)"
    )
    (last,) = run.rows("SELECT MAX(attempt) FROM attempts")[0]
    lost = [k for k, attempt in now if attempt < last]
    figures = {
        "at crashes": len(crashed),
        "of these handed out again": sum(again for _, again in crashed),
        "in flight now": _listed([k for k, attempt in now if attempt == last]),
        "sampled, not trained": _listed([k for (k,) in waiting]),
    }
    failures = _prompts_named(run, lost, "was in flight at a crash and is not sampled again")
    return Check("in flight", figures, failures)


def trained_once(run: AuditedRun) -> Check:
    """Check that no trajectory is trained on twice, no sample of a prompt by two trajectories."""
    # dynamic sampling by replacement lets a trajectory stand in for others within its step
    trajectories = run.rows(
        "SELECT trajectory_id, GROUP_CONCAT(step) FROM live_ends WHERE reason IS NULL "
        "GROUP BY 1 HAVING COUNT(*) > 1"
    )
    samples = run.rows(
        "SELECT g.ordinal, t.sample, GROUP_CONCAT(e.step) FROM live_ends e "
        "JOIN trajectories t ON t.id = e.trajectory_id JOIN groups g ON g.id = t.group_id "
        "WHERE e.reason IS NULL GROUP BY 1, 2 HAVING COUNT(DISTINCT t.id) > 1"
    )
    (trained,) = run.rows("SELECT COUNT(*) FROM live_ends WHERE reason IS NULL")[0]
    failures = [f"trajectory {i} was trained at steps {steps}" for i, steps in trajectories]
    failures += [
        f"sample {sample} of prompt {k} was trained by two trajectories, at steps {steps}"
        for k, sample, steps in samples
    ]
    return Check("none trained twice", {"trained": trained, "twice": len(failures)}, failures)


def batches(run: AuditedRun) -> Check:
    """Check that a step has train_batch_size prompts with all their samples.

    With dynamic sampling by replacement it has at most these. Those that were dropped after
    sampling, as by a filter, are part of it.
    """
    size, samples = run.facts["train_batch_size"], run.facts["samples"]
    replaced = run.facts.get("dynamic_sampling") == "replace"
    found = run.rows(
        "SELECT e.step, COUNT(DISTINCT t.group_id), "
        "COUNT(DISTINCT t.group_id || ':' || t.sample) FROM live_ends e "
        "JOIN trajectories t ON t.id = e.trajectory_id "
        "WHERE e.reason IS NOT 'dynamic_sampling' AND e.step <= ? GROUP BY 1",
        run.last_step,
    )
    wrong = [
        f"step {step} has {rows} trajectories of {groups} prompts, not {samples} of each of {size}"
        for step, groups, rows in found
        if rows != groups * samples or (groups > size if replaced else groups != size)
    ]
    figures = {"prompts a step": size, "samples": samples, "wrong steps": len(wrong)}
    return Check("whole batches", figures, wrong)


def ends(run: AuditedRun) -> Check:
    """Check that every trajectory of a finished step ends once.

    It is trained on, or dropped for a reason.
    """
    due = {  # steps that are finished with a trajectory that ended nowhere; free: in order
        "sync": "g.step + 1 <= :last",
        "lockstep": "g.ordinal / :size + 1 <= :last",
        "free": "t.id < (SELECT MAX(trajectory_id) FROM live_ends e JOIN trajectories u "
        "ON u.id = e.trajectory_id JOIN groups h ON h.id = u.group_id "
        "WHERE h.ordinal % :size >= :begin AND h.ordinal % :size < :end)",
    }[run.schedule]
    lost = [
        row
        for share in run.shares
        for row in run.db.execute(
            "SELECT t.id, t.sample, g.ordinal FROM live_trajectories t JOIN groups g "
            "ON g.id = t.group_id WHERE NOT EXISTS "
            "(SELECT 1 FROM live_ends e WHERE e.trajectory_id = t.id) "
            f"AND g.ordinal % :size >= :begin AND g.ordinal % :size < :end AND {due}",
            {
                "last": run.last_step,
                "size": run.facts["train_batch_size"],
                "begin": share.start,
                "end": share.stop,
            },
        )
    ]
    twice = run.rows(
        "SELECT trajectory_id, COUNT(*), GROUP_CONCAT(COALESCE(reason, 'trained')) "
        "FROM live_ends GROUP BY 1 HAVING COUNT(*) > 1"
    )
    strangers = run.rows(
        "SELECT trajectory_id, step FROM live_ends WHERE trajectory_id NOT IN "
        "(SELECT t.id FROM live_trajectories t JOIN live_groups g ON g.id = t.group_id)"
    )
    reasons = run.rows(
        "SELECT COALESCE(reason, 'trained'), COUNT(*) FROM live_ends GROUP BY 1 ORDER BY 2 DESC"
    )
    failures = [f"trajectory {i} (sample {s} of prompt {k}) ended nowhere" for i, s, k in lost]
    failures += [f"trajectory {i} ended {n} times: {how}" for i, n, how in twice]
    failures += [f"trajectory {i}, which ended at step {t}, is not known" for i, t in strangers]
    return Check("every trajectory ends once", {**dict(reasons), "lost": len(lost)}, failures)


def steps(run: AuditedRun) -> Check:
    """Check that steps follow one another, each by one attempt."""
    found = [step for (step,) in run.rows("SELECT step FROM live_steps ORDER BY step")]
    expected = range(run.from_step + 1, run.last_step + 1)
    failures = [f"step {step} is missing" for step in sorted(set(expected) - set(found))]
    failures += [f"step {step} is there {n} times" for step, n in Counter(found).items() if n > 1]
    failures += [
        f"step {step} was trained by attempts {attempts}"
        for step, attempts in run.rows(
            "SELECT step, GROUP_CONCAT(DISTINCT attempt) FROM (SELECT step, attempt FROM live_ends "
            "UNION SELECT step, attempt FROM live_steps) GROUP BY 1 "
            "HAVING COUNT(DISTINCT attempt) > 1"
        )
    ]
    (again,) = run.rows("SELECT COUNT(*) FROM steps WHERE superseded > 0")[0]
    return Check("steps", {"finished": len(found), "done again after a crash": again}, failures)


def length_bias(run: AuditedRun) -> Check:
    """Check that what crashes threw away was as long as what was sampled in its place.

    A paired sign-flip permutation test over samples of prompts. Free-running workers record short
    groups first, so what is thrown away there is short by selection: only longer counts as loss.
    """
    tokens = run.pairs(
        "WITH thrown AS (SELECT g.ordinal AS k, t.sample AS s, MIN(t.id) AS id FROM trajectories t "
        "JOIN groups g ON g.id = t.group_id WHERE t.superseded > 0 GROUP BY 1, 2) "
        "SELECT old.tokens, new.tokens FROM thrown JOIN trajectories old ON old.id = thrown.id "
        "JOIN live_groups g ON g.ordinal = thrown.k "
        "JOIN live_trajectories new ON new.group_id = g.id AND new.sample = thrown.s"
    )
    (thrown,) = run.rows("SELECT COUNT(*) FROM trajectories WHERE superseded > 0")[0]
    difference = tokens[:, 0] - tokens[:, 1]
    p = sign_flip_p(difference, one_sided=run.schedule == "free")
    mean = float(difference.mean()) if len(difference) else 0.0
    figures = {
        "thrown away": thrown,
        "compared samples": len(difference),
        "of other length": int(np.count_nonzero(difference)),
        "mean difference": f"{mean:+.3f} tokens",
        "p": f"{p:.4f}",
    }
    text = (
        f"{len(difference)} trajectories that crashes threw away were on average {abs(mean):.2f} "
        f"tokens {'longer' if mean > 0 else 'shorter'} than those in their place (p = {p:.4f})"
    )
    failures = [text] if p < BIASED else []
    return Check("no length bias", figures, failures)


def sign_flip_p(difference: np.ndarray, *, one_sided: bool) -> float:
    """Return p of a mean of paired differences [n] at least as large, were each sign a coin's.

    Exact for up to EXACT differences that are not 0, else FLIPS random flips (seed 0), the observed
    one counted.
    """
    values = difference[difference != 0].astype(np.int64)
    if not len(values):
        return 1.0
    if len(values) <= EXACT:
        bits = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        sums, extra = (1 - 2 * bits) @ values, 0
    else:
        signs = np.random.default_rng(0).integers(0, 2, (FLIPS, len(values)), np.int8)
        sums, extra = (1 - 2 * signs.astype(np.int64)) @ values, 1
    seen = values.sum()
    as_large = sums >= seen if one_sided else abs(sums) >= abs(seen)
    return float((as_large.sum() + extra) / (len(sums) + extra))


def rollout_files(run: AuditedRun) -> Check:
    """Check that the recorded trajectories of every step are there, byte for byte as written."""
    found = run.rows("SELECT step, file, file_digest FROM live_steps ORDER BY step")
    failures, unrecorded = [], 0
    for step, file, digest in found:
        if file is None:
            unrecorded += 1
        elif not (path := run.folder / file).is_file():
            failures.append(f"step {step}: {file} does not exist")
        elif file_digest(path) != digest:
            failures.append(f"step {step}: {file} is not what was written")
        else:
            try:
                routes_elsewhere(path)
            except (ValueError, FileNotFoundError) as error:
                failures.append(f"step {step}: {error}")
    figures = {"files": len(found) - unrecorded, "steps without": unrecorded}
    off = f"{unrecorded} steps were not recorded (trainer.ledger.record_rollouts=False)"
    return Check("recorded rollouts", figures, failures, off if unrecorded else "")


def checkpoints(run: AuditedRun) -> Check:
    """Check that a checkpoint knows the steps up to its own, and none after it.

    None is of another run.
    """
    failures, others, checked = [], 0, []
    for step in run.checkpoints:
        try:
            meta, _ = read_metadata(run.checkpoint_folder / f"{PREFIX}_{step}")
            ledger = meta.get("ledger") or {}
            of_this_run = ledger.get("run_id") == run.run_id
            position = int(ledger.get("position", 0))
        except FileNotFoundError:  # the run goes on, and keeps only its latest
            continue
        except (ValueError, TypeError, AttributeError) as error:
            failures.append(f"{PREFIX}_{step} is damaged: its meta is not JSON of a run ({error})")
            continue
        if not of_this_run:
            others += 1
            failures += _strangers(run, step, (meta.get("config") or {}).get("trainer") or {})
            continue
        checked.append(step)
        failures += _disagreements(run, step, position)
    figures = {"checkpoints": len(checked), "newest": max(checked, default=None), "others": others}
    return Check("checkpoints", figures, failures)


def rows(run: AuditedRun) -> Check:
    """Check that the rows of the ledger are those that the run wrote, to the bit."""
    counts = {name: run.rows(f"SELECT COUNT(*) FROM {name}")[0][0] for name in TABLES}
    if run.damage:
        return Check("rows as written", counts, [f"{FILE} is damaged: {run.damage}. {REMEDY}"])
    text = f"{FILE} was begun by an earlier version, whose rows have no checksums"
    return Check("rows as written", counts, unknown="" if run.is_sealed else text)


def _strangers(run: AuditedRun, step: int, saved: dict[str, Any]) -> Iterable[str]:
    """Name a checkpoint of another run; with a lost ledger the run's own has its name."""
    saver, audited = saved.get("run_name"), run.trainer.get("run_name")
    if saver != audited:
        yield (
            f"{PREFIX}_{step} in {run.checkpoint_folder} was saved by the run {saver}, not by "
            f"{audited}"
        )


def _disagreements(run: AuditedRun, step: int, position: int) -> Iterable[str]:
    """Yield what the ledger has on the wrong side of a checkpoint's position."""
    name = f"{PREFIX}_{step}"
    before = run.rows("SELECT COUNT(*) FROM live_steps WHERE id <= ?", position)[0][0]
    if before != step - run.from_step and step > run.from_step:
        yield f"{name} holds {step} steps, the ledger has {run.from_step + before} by then"
    late = run.rows(
        "SELECT COUNT(*) FROM live_ends WHERE (id <= ?) != (step <= ?)", position, step
    )[0][0]
    if late and step > run.from_step:
        yield f"{name}: {late} trajectories ended on the other side of it than the ledger says"


def _prompts_named(run: AuditedRun, ordinals: list[int], what: str) -> list[str]:
    uids = run.uids(np.array(ordinals, np.int64))
    size = run.facts["train_batch_size"]
    return [
        f"prompt {k} ({uid}, batch {k // size}) {what}"
        for k, uid in zip(ordinals, uids, strict=True)
    ]


def _listed(ordinals: list[int]) -> str:
    shown = ", ".join(map(str, sorted(ordinals)[:10]))
    return f"{len(ordinals)} ({shown}{', ...' if len(ordinals) > 10 else ''})" if ordinals else "0"
