"""The calculator as a tool: turns, rewards, demonstrations, and a run that learns to call it."""

import itertools
from pathlib import Path

import pytest

from benchmarks.tool_use import MODEL as POLICY, demonstrate, load
from jaxrl import envs
from jaxrl.data.conversations import encode_conversation
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.envs.toys.calculator import CalculatorToolGroup, prompts
from jaxrl.records.json_lines import read_lines
from jaxrl.train import train

MODEL = Path(__file__).parents[2] / "configs" / "tiny_tool_model"


def make(answer="-830", max_turns=4):
    return envs.make(
        "calculator", {"reward_spec": {"ground_truth": answer}, "max_turns": max_turns}
    )


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("37*24", "888"),
        ("58-888", "-830"),
        ("-5--12", "7"),
        (" 3 + 4 ", "7"),
        ("1+2+3", "error"),  # one operation
        ("(3+4)", "error"),
        ("7", "error"),
        ("6/2", "error"),
        ("9**9", "error"),
        ("1" * 13 + "*2", "error"),  # 12 digits at most
        ("", "error"),
    ],
)
def test_tool(operation, result):
    assert CalculatorToolGroup().execute_tool("calc", operation) == result


def test_a_conversation():
    """58-(37*24): 37*24 = 888, 58-888 = -830."""
    env = make()
    first = env.step("<calc>37*24</calc>")
    assert first["observations"] == [{"role": "user", "content": "<result>888</result>"}]
    assert (first["reward"], first["done"]) == (0.0, False)
    # what follows a call would be made up
    second = env.step("<calc>58-888</calc><result>-8</result><answer>-8</answer>")
    assert second["postprocessed_action"] == "<calc>58-888</calc>"
    assert second["observations"][0]["content"] == "<result>-830</result>"
    last = env.step("<answer>-830</answer>")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"correct": 1.0, "answered": 1.0, "calls": 2, "malformed": 0}


def test_malformed_turns_are_told_and_counted():
    env = make()
    for action in ("<calc>58-(37*24)</calc>", "-830", "<calc>37*24"):
        output = env.step(action)
        assert output["observations"][0]["content"] == "<result>error</result>"
        assert (output["reward"], output["done"]) == (0.0, False)
        assert output["postprocessed_action"] == action
    assert env.step("<answer>7</answer>")["reward"] == 0.0
    assert env.get_metrics() == {"correct": 0.0, "answered": 1.0, "calls": 1, "malformed": 3}


def test_the_last_turn_ends_the_conversation():
    env = make(max_turns=2)
    env.step("<calc>37*24</calc>")
    last = env.step("<calc>58-888</calc>")
    assert (last["done"], last["reward"], last["observations"]) == (True, 0.0, [])
    assert env.get_metrics() == {"correct": 0.0, "answered": 0.0, "calls": 2, "malformed": 0}


@pytest.mark.parametrize("operations", [1, 2, 4])
def test_demonstrations_earn_the_reward(operations):
    """Said to the environment, a completion gets the very results that it holds, and 1."""
    tokenizer = load_tokenizer(MODEL)
    for row in prompts(40, seed=3, operations=operations):
        env = make(row["reward_spec"]["ground_truth"], max_turns=operations + 1)
        assert int(env.ground_truth) == eval(row["prompt"][0]["content"])
        said = row["completion"]
        assert len(said) == 2 * operations + 1
        for message, answer in itertools.zip_longest(said[::2], said[1::2]):
            output = env.step(message["content"])
            assert output["observations"] == ([answer] if answer else [])
        assert (output["reward"], output["done"]) == (1.0, True)
        conversation = encode_conversation(tokenizer, [*row["prompt"], *said])
        assert tokenizer.unk_token_id not in conversation.tokens


def test_results_are_not_imitated():
    (row,) = prompts(1, seed=3)
    tokenizer = load_tokenizer(MODEL)
    conversation = encode_conversation(tokenizer, [*row["prompt"], *row["completion"]])
    imitated = [t for t, m in zip(conversation.tokens, conversation.loss_mask, strict=True) if m]
    said = [m["content"] + "<eos>" for m in row["completion"] if m["role"] == "assistant"]
    assert tokenizer.decode(imitated) == "".join(said)


def test_answers_in_the_head():
    rows = list(prompts(400, seed=1, in_head=0.5))
    turns = [len(row["completion"]) // 2 for row in rows]
    # no call: 1/2, one: 1/4, both: 1/4; of 400, give or take three deviations of 10, 8.7, 8.7
    assert abs(turns.count(0) - 200) < 30
    assert abs(turns.count(1) - 100) < 26
    assert abs(turns.count(2) - 100) < 26
    for row in rows:
        value = eval(row["prompt"][0]["content"])
        assert row["completion"][-1]["content"] == f"<answer>{value}</answer>"
    same = [row["prompt"] for row in prompts(400, seed=1)]
    assert same == [row["prompt"] for row in rows]  # with or without calls


def test_training_and_evaluation_do_not_meet():
    train, held_out = (
        {row["prompt"][0]["content"] for row in prompts(500, split=split)}
        for split in ("train", "eval")
    )
    assert len(train) == len(held_out) == 500
    assert not train & held_out


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"operations": 5}, "operations=5 must be from 1 to 4"),
        ({"in_head": 1.5}, "in_head=1.5 from 0 to 1"),
        ({"size": 0}, "size=0 must be at least 1"),
    ],
)
def test_wrong_settings(settings, problem):
    with pytest.raises(ValueError, match=problem):
        list(prompts(**{"size": 1, **settings}))


@pytest.mark.slow  # 250 steps of fine-tuning, 50 of reinforcement learning
def test_the_reward_of_the_answer_teaches_the_calculator(tmp_path):
    changes = {
        f"{POLICY}.path": demonstrate(1, tmp_path / "sft"),
        "trainer.max_training_steps": 50,
        "trainer.eval_interval": 50,
        "trainer.micro_train_batch_size_per_gpu": 32,
        "trainer.micro_forward_batch_size_per_gpu": 32,
    }
    train(load("calculator_grpo", changes, 1, tmp_path / "grpo"))
    lines = read_lines(tmp_path / "grpo" / "run" / "metrics.jsonl")
    assert lines[-1]["eval/all/avg_score"] > lines[0]["eval/all/avg_score"] + 0.2
    assert lines[-1]["environment/calls"] > lines[1]["environment/calls"] + 0.3
