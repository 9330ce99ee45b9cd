"""Faults that once lived: each is held by a test since, and by `python -m tests.faults --known`."""

from tests.faults.places import ROOT, Fault

# file of jaxrl/, what stands on one line of it, what would stand there, the tests that hold it
KNOWN = (
    # masked tokens, and those of advantage 0, would count in M2PO's mean
    (
        "losses/m2po.py",
        "log_ratio * advantages > 0",
        "log_ratio * advantages >= 0",
        "losses/test_m2po.py",
    ),
    # rejections would be of what is left, not of all that was sampled
    (
        "losses/off_policy.py",
        "_within(log_ratio, sampled, ",
        "_within(log_ratio, mask, ",
        "losses/test_off_policy.py",
    ),
    # rows without a token would count in the mean of the weights of sequences
    (
        "losses/off_policy.py",
        "mask.shape else rows)",
        "mask.shape else jnp.ones_like(rows))",
        "losses/test_off_policy.py",
    ),
    # the clip ratio would count demonstrations
    (
        "losses/luffy.py",
        'metrics["clip_ratio"] & ~given',
        'metrics["clip_ratio"]',
        "losses/test_luffy.py",
    ),
    # of equal samples not the shorter one would be kept
    ("advantages/gfpo.py", "lexsort((lengths, ", "lexsort((", "advantages/test_gfpo.py"),
    # the teacher's term would lose its off-policy weight
    (
        "training/objective.py",
        "as_loss(counted * taught) * correction",
        "as_loss(counted * taught)",
        "training/test_objective.py",
    ),
    # the KL "as the loss" would count only what `renormalize` left
    (
        "training/objective.py",
        "kl_as_loss=as_loss(mask)",
        "kl_as_loss=as_loss(counted)",
        "training/test_objective.py",
    ),
    # columns of rewards would stand in the order of the rows, not of their names
    (
        "data/packing.py",
        "sorted({name for row in terms for name in row})",
        "list(dict.fromkeys(name for row in terms for name in row))",
        "data/test_packing.py",
    ),
    # a greedy row would be scored by what the filters leave
    (
        "rollout/native/sampling.py",
        "jnp.where(greedy[:, None], weights, left)",
        "left",
        "rollout/test_sampling.py",
    ),
    # a call would be drawn with the adapter that comes to its place
    (
        "tools/tinker/samplers.py",
        "if self._beginning:",
        "if False:",
        "tools/tinker/test_samplers.py",
    ),
    # a harness would have all keys of the trainer
    (
        "rollout/server/agent_program.py",
        "**child_environment(),",
        "**__import__('os').environ,",
        "rollout/server/test_agent_program.py",
    ),
    # a shell command of the model would reward itself
    (
        "rollout/server/sessions.py",
        "own is not None and not hmac",
        "own is None and not hmac",
        "rollout/server/test_agent_program.py",
    ),
    # a row of a file would import a module
    ("train.py", "if not (environment := ", "if (environment := ", "envs/test_readiness.py"),
)


def known_faults() -> list[tuple[Fault, str]]:
    """Return the faults that once lived, where the code has them now, each with its test file."""
    return [(found(f"jaxrl/{path}", *texts), f"tests/{test}") for path, *texts, test in KNOWN]


def found(path: str, before: str, after: str) -> Fault:
    """Return the fault of a text that stands on one line of a file."""
    lines = enumerate((ROOT / path).read_text().splitlines(), start=1)
    ((number, line),) = [(n, line) for n, line in lines if before in line]
    begin = len(line[: line.index(before)].encode())
    return Fault(path, number, begin, begin + len(before.encode()), before, after)
