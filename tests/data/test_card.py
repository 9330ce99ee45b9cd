"""The data card: literal lines, what counts as a duplicate, the warning, and its place in a run."""

import dataclasses
import functools

import pytest

from jaxrl.data.card import data_card, normalized
from jaxrl.data.order import data_order
from jaxrl.data.tokenizer import character_tokenizer, unknown_text, unknown_token
from jaxrl.envs import ENVS, NEED_TRUTH, make
from jaxrl.types import Prompt

LOOSELY = "without case and punctuation"
OF = "tokens (min / median / p95 / max)"
TRUTH = {"reward_spec": {"ground_truth": "4"}}


def prompt(uid, text, length=3, env_class="gsm8k", extras=TRUTH):
    return Prompt(uid, [{"role": "user", "content": text}], (1,) * length, env_class, extras)


def test_the_lines_of_two_sources():
    train = [
        prompt("0:0", "How many?", 3),
        prompt("0:1", "how  many", 4),  # loosely the one before
        prompt("0:3", "How many?", 9, extras={}),
        prompt("0:4", "Which?", 5, extras={"reward_model": {"ground_truth": 0}}),
        prompt("1:0", "Who?", 2, "aime", {"reward_spec": {"ground_truth": ""}}),
        prompt("1:1", "Which?", 2),
    ]
    evaluation = [prompt("0:0", "Where?"), prompt("0:1", "WHO"), prompt("0:2", "Which?")]
    card = data_card(
        train,
        evaluation,
        sources=["a.parquet", "b.parquet"],
        eval_sources=["c.parquet"],
        too_long={"a.parquet": 2},
        need_truth=["gsm8k", "aime"],
        order=data_order([0, 0, 0, 0, 1, 1], 4, 0, weights=[3, 1]),
        steps=6,
    )
    warning = (
        "WARNING: 2 of 3 evaluation prompts also occur in the training data, ignoring case, "
        "whitespace and punctuation (0:1 is 1:0 of train, 0:2 is 0:4 of train): the evaluation "
        "then measures memory. Take them out of data.train_data"
    )
    assert card.warnings == (warning,)
    assert card.folded.splitlines() == [
        "train 4 prompts (2 are too long and left out): a.parquet",
        "train 2 prompts: b.parquet",
        "eval  3 prompts: c.parquet",
        warning,
    ]
    assert str(card).splitlines() == [
        "data:",
        "  train 0: a.parquet",
        f"    4 prompts (2 are too long and left out); 3 / 5 / 9 / 9 {OF}",
        "    environment gsm8k; 1 without a ground truth",
        f"    repeat an earlier prompt: 1 (2 {LOOSELY}); are also in the evaluation: 1",
        "    3 of 4 prompts of a batch (75.0%), 4.50 passes in 6 batches",  # 6 * 3 / 4
        "  train 1: b.parquet",
        f"    2 prompts; 2 / 2 / 2 / 2 {OF}",
        "    environment aime 1, gsm8k 1; 1 without a ground truth",
        f"    repeat an earlier prompt: 1; are also in the evaluation: 1 (2 {LOOSELY})",
        "    1 of 4 prompts of a batch (25.0%), 3.00 passes in 6 batches",  # 6 * 1 / 2
        "  eval 0: c.parquet",
        f"    3 prompts; 3 / 3 / 3 / 3 {OF}",
        "    environment gsm8k; 0 without a ground truth",
        "    repeat an earlier prompt: none",
        warning,
    ]


def test_a_ground_truth_is_counted_where_the_environment_needs_one_and_one_is_singular():
    train = [prompt("0:0", "a", env_class="my.module:Env", extras={})]
    order = data_order([0], 1, 0)
    card = data_card(train, [], sources=["a"], need_truth=NEED_TRUTH, order=order, steps=1)
    assert card.lines[2:4] == (
        f"    1 prompt; 3 / 3 / 3 / 3 {OF}",
        "    environment my.module:Env",
    )
    assert card.lines[-1] == "    all sources in one pool, 1.00 passes in 1 batch"
    mixed = [*train, prompt("0:1", "b", extras={}), prompt("0:2", "c", env_class="single_turn")]
    card = data_card(mixed, [], sources=["a"], need_truth=NEED_TRUTH)
    assert card.lines[3].endswith("gsm8k 1, single_turn 1; 1 without a ground truth")


@pytest.mark.parametrize("name", sorted(set(ENVS) - {"llm_as_a_judge"}))  # which asks for a key
def test_the_environments_that_need_a_ground_truth_are_those_that_refuse_a_row_without(name):
    try:
        make(name, {})
    except ValueError as error:
        assert ("ground_truth" in str(error)) is (name in NEED_TRUTH)
    else:
        assert name not in NEED_TRUTH


def test_one_pool_and_no_overlap():
    train = [prompt("0:0", "a"), prompt("1:0", "b")]
    card = data_card(
        train, [prompt("0:0", "c")], sources=["a", "b"], order=data_order([0, 1], 2, 0), steps=3
    )
    assert card.warnings == ()
    assert "    all sources in one pool, 3.00 passes in 3 batches" in card.lines


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is it?", " what  is\nit", True),
        ("Say 'yes'.", "say yes", True),
        ("1.5 or 2,000", "1.5 or 2,000.", True),
        ("1.5", "1 5", False),
        ("3-4", "34", False),
        ("3 + 4", "3 - 4", False),
        ("\uff21\uff11", "a1", True),  # full-width letters
        ("caf\u00e9", "cafe\u0301", True),
    ],
)
def test_what_is_the_same_loosely(one, other, same):
    assert (normalized(one) == normalized(other)) is same


def test_messages_of_other_roles_are_other_prompts():
    system = Prompt("0:1", [{"role": "system", "content": "a"}], (1,), "gsm8k")
    card = data_card([prompt("0:0", "a"), system], [], sources=["a"])
    assert "    repeat an earlier prompt: none" in card.lines


def test_prompts_that_the_model_cannot_read_are_warned_of():
    def card(unknown):
        readable, other = prompt("0:0", "12"), Prompt("0:1", [], (4, 47, 47), "gsm8k", TRUTH)
        return data_card([readable, other], [], sources=["a"], unknown_token=unknown)

    (warning,) = card(47).warnings
    assert warning.startswith(
        "WARNING: 1 of 2 prompts have text that the vocabulary lacks, and the model reads the "
        "unknown token there (0:1, ..)"
    )
    assert card(None).warnings == card(5).warnings == ()


def test_some_of_what_the_vocabulary_lacks_is_shown():
    tokenizer = character_tokenizer("12>")
    rows = [prompt("0:0", "1+1"), prompt("0:1", "2x+")]
    unknown = unknown_token(tokenizer)
    rows = [dataclasses.replace(row, tokens=(unknown,)) for row in rows]
    (warning,) = data_card(
        rows,
        [],
        sources=["a"],
        unknown_token=unknown,
        unknown_text=functools.partial(unknown_text, tokenizer),
    ).warnings
    assert warning == (
        "WARNING: 2 of 2 prompts have text that the vocabulary lacks, such as '+', 'x', and the "
        "model reads the unknown token there (0:0, 0:1, ..): write them in its characters, or take "
        "a model that knows them"
    )
