"""Conversations turn by turn, and as their template writes them whole."""

import pytest
from tokenizers import pre_tokenizers

from jaxrl.rollout.conversations.drift import CONVERSATIONS, Drift, drift_of, drifts
from tests.rollout.test_turn_templates import TEMPLATES, backend as _backend, tokenizer_with

backend = _backend  # the fixture
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {{ c.function.arguments.a }} "
    "{{ c.function.arguments.b }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's way: what was thought before the last question is not written again.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MORE = {"tools": (TOOLS, "<|im_end|>"), "forgets": (FORGETS, "<|im_end|>")}
KNOWN = {  # conversations that drift, by template; all others do not
    "thinking": {"two turns", "blanks at the ends", "thinking"},  # an empty thought, the last alone
    "gemma": {"blanks at the ends"},  # they are trimmed
    # GPT-2's rule cuts "\\n\\n" in two where a word follows, and a prompt ends with both
    "llama3": {"two turns", "blanks at the ends", "thinking"},
    "llama2": {"two turns", "blanks at the ends", "thinking"},  # a blank before the words
    "forgets": {"thinking", "blanks at the ends"},
}


def found_with(backend, name):
    template, end = (TEMPLATES | MORE)[name]
    tokenizer = tokenizer_with(backend, template, end)
    return tokenizer, drifts(tokenizer, {}, [tokenizer.convert_tokens_to_ids(end)])


@pytest.mark.parametrize("name", [*TEMPLATES, *MORE])
def test_what_is_known_of_each_template(backend, name):
    _, found = found_with(backend, name)
    assert list(found) == list(CONVERSATIONS)
    if name != "tools":  # these write no calls
        found.pop("tools")
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        # an answer by itself begins with a blank, which the whole text has not
        assert all(isinstance(drift, Drift) or name == "llama2" for drift in found.values())
        return
    drifted = {case for case, drift in found.items() if isinstance(drift, Drift)}
    assert drifted == KNOWN.get(name, set()), found
    assert not any(isinstance(drift, Exception) for drift in found.values())


def test_a_thought_that_is_not_written_again(backend):
    """What is lost is the first answer's thought, up to the words that stay."""
    tokenizer, found = found_with(backend, "forgets")
    thought = tokenizer("<think>\nTwo and two.\n</think>\n\n", add_special_tokens=False).input_ids
    drift = found["thinking"]
    assert isinstance(drift, Drift)
    assert abs(drift.lost - len(thought)) <= 1  # a token may reach over the end
    assert drift.turns.lstrip().startswith("<think>")
    assert drift.whole.lstrip().startswith("4")


def test_a_tokenizer_that_joins_what_was_sampled_apart(backend):
    """The template puts the answer against a word: as one text it is one token, "lower"."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with(backend, template, "</s>")
    messages = [
        {"role": "user", "content": "low"},
        {"role": "assistant", "content": "er"},
    ]
    drift = drift_of(tokenizer, messages, {}, [])
    assert drift is not None and drift.lost > 0
