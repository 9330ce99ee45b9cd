"""The hostile programs of test_sandbox.py as answers of a model, to `lcb` and `python_code`."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxrl import envs
from jaxrl.data.tokenizer import character_tokenizer
from tests.envs.test_sandbox import HOSTILE, LIMITS, marked, needs_sandbox, wait_for_none
from tests.rollout.scripted import converse, make_prompt

__all__ = ["marked"]  # a fixture: by it the processes of these sandboxes are known
QUICK = (
    "fork bomb that sleeps",
    "memory of one process",
    "infinite output",
    "environment of the parent",
    "link to the host's files",
    "kills its group",
    "shared memory without a name",
    "output on its way to nobody",
    "interrupts process 1",
)
TESTS = {"reward_spec": {"ground_truth": json.dumps([{"input": "", "output": "7"}])}}


def host():
    """What a program must not change."""
    return Path("/proc/self/mounts").read_text(), os.getpgid(0), sorted(os.listdir("."))


@needs_sandbox
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in HOSTILE]
)
def test_a_hostile_program_earns_nothing(name):
    """Reward 0, the reason in the metadata, no process left, the host as it was."""
    reason, code = HOSTILE[name]
    limits = replace(LIMITS, seconds=1.0) if reason == "timeout" else LIMITS
    settings, before = {"sandbox": asdict(limits)}, host()

    step = envs.make("lcb", TESTS, settings).step(f"```python\n{code}\n```")
    assert (step["reward"], step["done"], step["metadata"]["num_passed"]) == (0.0, True, 0)
    # one that harms nobody still gives no right answer
    assert step["metadata"]["reason"] == ("wrong answer" if reason == "ok" else reason)

    env = envs.make("python_code", {"reward_spec": {"ground_truth": "7"}}, settings)
    step = env.step(f"<python>{code}</python>")
    assert (step["reward"], step["done"], step["metadata"]["reason"]) == (0.0, False, reason)
    said = step["observations"][0]["content"]
    assert len(said) < 10_000 and "root:" not in said
    assert env.get_metrics()["program_errors"] == (reason != "ok")

    assert wait_for_none() == []
    assert host() == before


@needs_sandbox
def test_a_program_that_ends_its_judge_earns_nothing(marked):
    """It has a reward and a reason; a failed environment would take it out of the loss."""
    begins = '_say({"begun": True})'
    marked.write_text(marked.read_text().replace(begins, f"{begins}; os._exit(1)"))
    step = envs.make("lcb", TESTS, {}).step("```python\nprint(7)\n```")
    assert (step["reward"], step["metadata"]["reason"]) == (0.0, "killed")
    env = envs.make("python_code", {"reward_spec": {"ground_truth": "7"}}, {})
    step = env.step("<python>print(7)</python>")
    assert (step["reward"], step["metadata"]["reason"]) == (0.0, "killed")
    assert step["observations"][0]["content"].endswith("Error: ended by signal 9\n</output>")


@needs_sandbox
def test_only_the_harmless_answer_of_a_batch_earns():
    """Side by side in the workers of a run; the others have no effect on it."""
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    programs = ["print(7)", *(HOSTILE[name][1] for name in QUICK)]
    before = host()

    def reply(tokens, key):
        code = programs[int(tokenizer.decode(tokens).split()[0])]
        return [*tokenizer.encode(f"```\n{code}\n```"), tokenizer.eos_token_id]

    rows = [
        make_prompt(tokenizer, f"{i} \n", uid=f"0:{i}", env_class="lcb", **TESTS)
        for i in range(len(programs))
    ]
    output = converse(reply, rows, tokenizer)
    assert output["rewards"] == [1.0, *[0.0] * len(QUICK)]
    assert output["rollout_metrics"]["environment/passed"] == pytest.approx(1 / len(programs))
    assert wait_for_none() == []
    assert host() == before
