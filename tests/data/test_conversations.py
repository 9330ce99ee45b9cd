"""Which tokens of a conversation are imitated, for templates of several kinds."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.conversations import (
    Conversation,
    conversation_batch,
    encode_conversation,
    load_conversations,
)
from jaxrl.data.prompts import BadRow
from jaxrl.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
CHATML_TURN = (
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
)
MARKED = (  # only what the assistant says is between the markers
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    + CHATML_TURN
    + "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# the form of Gemma 3: <bos>, the system message inside the first turn, "model", trimmed contents
GEMMA3 = (
    "{{ bos_token }}{% set system = messages[0]['content'] + '\n\n' "
    "if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ (system if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# as reasoning models do: what was thought is dropped from all turns but the last
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if loop.last "
    "else m['content'].split('=')[-1]) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f=g"},
]


def characters(template):
    """One token per character, and special ones."""
    alphabet = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIAL])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def imitated(tokenizer, conversation):
    """The runs of imitated tokens, as text."""
    mask = np.array([0, *conversation.loss_mask, 0])
    starts, ends = (np.flatnonzero(np.diff(mask) == sign) for sign in (1, -1))
    pairs = zip(starts, ends, strict=True)
    return [tokenizer.decode(conversation.tokens[a:b]) for a, b in pairs]


def encode(tokenizer, messages=CHAT, stops=("<eos>", "<|im_end|>", "<end_of_turn>"), **options):
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    return encode_conversation(tokenizer, messages, stop_token_ids=ids, **options)


@pytest.mark.parametrize(
    ("template", "end"),
    [(MARKED, "<|im_end|>"), (CHATML, "<|im_end|>"), (GEMMA3, "<end_of_turn>")],
    ids=["markers", "chatml", "gemma3"],
)
def test_what_the_assistant_says_up_to_the_end_of_its_turn(template, end):
    """The newline after the end of a turn is the template's, no policy ever samples it."""
    tokenizer = characters(template)
    conversation = encode(tokenizer)
    assert imitated(tokenizer, conversation) == [f"cd{end}", f"f=g{end}"]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert list(conversation.tokens) == whole
    last = encode(tokenizer, train_on_what="last_assistant_message")
    assert imitated(tokenizer, last) == [f"f=g{end}"]
    assert last.tokens == conversation.tokens


def test_a_prompt_of_rl_and_its_response_are_the_conversation():
    """Supervised rows start with the very tokens that a policy will see."""
    tokenizer = characters(GEMMA3)
    messages = [{"role": "system", "content": "s"}, *CHAT[:2]]
    prompt = tokenizer.apply_chat_template(
        messages[:2], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    conversation = encode(tokenizer, messages)
    assert list(conversation.tokens[: len(prompt)]) == prompt
    assert conversation.loss_mask.index(1) == len(prompt)


def test_random_conversations_agree_with_the_markers():
    """Both ways find the same tokens, whatever the roles and contents."""
    rng, marked, plain = random.Random(0), characters(MARKED), characters(CHATML)
    for _ in range(30):
        roles = [rng.choice(["user", "assistant", "system", "tool"]) for _ in range(6)]
        roles[0], roles[3] = "user", "assistant"
        texts = ["".join(rng.choices("ab\n <>|", k=rng.randrange(6))) for _ in roles]
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        assert encode(marked, messages) == encode(plain, messages)


def test_a_template_that_rewrites_earlier_turns_is_refused_or_trained_on_its_last():
    tokenizer = characters(FORGETFUL)
    chat = [*CHAT[:3], {"role": "assistant", "content": "x=y"}, *CHAT[:2]]
    with pytest.raises(BadRow, match=r"message 3: up to the end of it .* renders 'x=y.* has 'y<"):
        encode(tokenizer, chat)
    last = encode(tokenizer, chat, train_on_what="last_assistant_message")
    assert imitated(tokenizer, last) == ["cd<|im_end|>"]


def test_a_turn_without_a_stop_token_is_imitated_to_its_end():
    tokenizer = characters(CHATML)
    assert imitated(tokenizer, encode(tokenizer, stops=["<eos>"])) == [
        "cd<|im_end|>\n",
        "f=g<|im_end|>\n",
    ]


def test_the_first_token_is_never_imitated():
    said = [{"role": "assistant", "content": "abc"}]
    template = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
    assert encode(characters(template), said).loss_mask == (0, 1, 1)
    with pytest.raises(BadRow, match="the chat template refuses its first 0 messages"):
        encode(characters(CHATML), said)  # no prompt that it could be the answer to


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="made by examples/smollm2_to_hf.py")
def test_smollm2():
    tokenizer = load_tokenizer(SMOLLM2)
    conversation = encode(tokenizer, stops=["<|im_end|>"])
    assert imitated(tokenizer, conversation) == ["cd<|im_end|>", "f=g<|im_end|>"]
    assert tokenizer.decode(conversation.tokens).startswith("<|im_start|>system\nYou are a helpful")


def test_the_tiny_character_model():
    tokenizer = load_tokenizer(ROOT / "configs" / "tiny_char_model")
    conversation = encode(tokenizer, [*CHAT[:2], *CHAT[2:]], stops=["<eos>"])
    assert tokenizer.decode(conversation.tokens) == "ab>cd<eos>e>f=g<eos>"
    assert imitated(tokenizer, conversation) == ["cd<eos>", "f=g<eos>"]


# ---------------------------------------------------------------- rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_messages_and_prompt_with_completion_in_either_form(tmp_path):
    tokenizer = characters(CHATML)
    rows = [
        {"messages": CHAT[:2]},
        {"prompt": "ab", "completion": "cd"},
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    ]
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    found, counts = load_conversations(
        [write(tmp_path / "a.jsonl", rows)], tokenizer, stop_token_ids=stops
    )
    assert found == [encode(tokenizer, CHAT[:2])] * 3
    assert counts == {"truncated": 0, "dropped": 0, "untrained": 0}
    # parquet gives every message the keys of all
    table = [{"messages": [{**m, "name": None} for m in CHAT[:2]]}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "b.parquet")
    source = str(tmp_path / "b.parquet")
    assert load_conversations([source], tokenizer, stop_token_ids=stops)[0] == found[:1]


def test_longer_ones_are_truncated_or_dropped_and_counted(tmp_path):
    """<|im_start|>user\\nab<|im_end|>\\n is 10 tokens, the generation prompt 11: 21, then cd."""
    tokenizer = characters(CHATML)
    long = {"messages": [{"role": "user", "content": "x" * 30}, CHAT[1]]}
    source = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}, long])
    load = lambda **options: load_conversations([source], tokenizer, **options)  # noqa: E731
    found, counts = load(max_length=25)
    assert counts == {"truncated": 2, "dropped": 0, "untrained": 1}
    assert [len(c.tokens) for c in found] == [25, 25]
    assert imitated(tokenizer, found[0]) == ["cd<|im_end|>\n"]
    found, counts = load(max_length=25, overlong="drop")
    assert counts == {"truncated": 0, "dropped": 2, "untrained": 0}
    assert len(found) == 1
    with pytest.raises(ValueError, match=r"no conversation is left .*sft.max_length=5 is too sho"):
        load(max_length=5)


def test_bad_rows_are_named(tmp_path):
    rows = [
        {"messages": CHAT},
        {"prompt": "a"},
        {"messages": CHAT[:1]},
        {"messages": [{"role": "assistant"}]},
        {"messages": [CHAT[0], CHAT[0], CHAT[1]]},
        7,
    ]
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match="5 of 6 rows are bad") as error:
        load_conversations([source], characters(GEMMA3))
    for expected in (
        "row 1: neither 'messages' nor 'prompt' and 'completion'; the columns are ['prompt']",
        "row 2: no message has the role 'assistant', there is nothing to imitate: ['user']",
        "row 3: message 0 (role 'assistant') has no content",
        "row 4: the chat template refuses its first 3 messages: TemplateError: roles must alter",
        "row 5: not a dict but int '7'",
    ):
        assert expected in str(error.value)


def test_tools_reach_the_template(tmp_path):
    template = "{{ tools[0]['name'] if tools else '' }}" + CHATML
    rows = [{"messages": CHAT[:2], "tools": [{"name": "look"}]}, {"messages": CHAT[:2]}]
    tokenizer = characters(template)
    found, _ = load_conversations([write(tmp_path / "a.jsonl", rows)], tokenizer)
    texts = [tokenizer.decode(c.tokens) for c in found]
    assert texts == ["look" + texts[1], texts[1]]


def test_batch_literal():
    """Two turns in the first row: the observation between them is response, but not imitated."""
    rows = [
        Conversation((4, 2, 13, 2, 45, 7, 13, 9), (0, 0, 0, 1, 1, 0, 0, 1)),
        Conversation((5, 13, 6, 45), (0, 0, 1, 1)),
    ]
    batch = conversation_batch(rows)
    np.testing.assert_array_equal(
        batch.tokens, [[4, 2, 13, 2, 45, 7, 13, 9], [5, 13, 6, 45] + [0] * 4]
    )
    np.testing.assert_array_equal(
        batch.loss_mask, [[0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1] + [0] * 4]
    )
    np.testing.assert_array_equal(batch.response_mask, [[0] * 3 + [1] * 5, [0, 0, 1, 1] + [0] * 4])
    np.testing.assert_array_equal(batch.lengths, [8, 4])
    np.testing.assert_array_equal(batch.index, [0, 1])
    assert batch.rollout_log_probs is None
