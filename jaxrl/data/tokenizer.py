"""Tokenizers: loading one with its chat template, encoding a prompt, and a character tokenizer."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxrl.config_error import fail
from jaxrl.hub import check_folder, local_folder, unfetched

if TYPE_CHECKING:  # two seconds, which a page without texts need not wait for
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Without one of these AutoTokenizer builds an empty vocabulary from config.json and says nothing.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

_SUFFIXES = ".json", ".model", ".txt", ".jinja"  # of what a tokenizer is read from

_WORDS = "d41d8cd98f00b204"  # what a user says where only what follows it is looked at

# The generation prompt stands before every assistant message too, so that a finished conversation
# starts with the very prompt that the policy saw.
_CHARACTER_TEMPLATE = (
    "{{%- for message in messages %}}"
    "{{%- if message['role'] == 'assistant' %}}"
    "{{{{- {prompt} + message['content'] + eos_token }}}}"
    "{{%- else %}}{{{{- message['content'] }}}}{{%- endif %}}"
    "{{%- endfor %}}"
    "{{%- if add_generation_prompt %}}{{{{- {prompt} }}}}{{%- endif %}}"
)


def load_tokenizer(
    folder_or_id: str | Path, chat_template_file: str | Path | None = None
) -> "PreTrainedTokenizerBase":
    """Load a Hugging Face tokenizer that has a chat template and an end-of-sequence token.

    A tokenizer without a pad token gets its end-of-sequence token for padding; jaxrl masks padding
    by position and never by token id.

    Args:
        folder_or_id: a local folder, or the name of a model on the Hugging Face hub.
        chat_template_file: a Jinja file used instead of the tokenizer's own chat template.

    Raises:
        FileNotFoundError: no such folder or model.
        ValueError: no tokenizer there, no chat template, or no end-of-sequence token.
    """
    tokenizer = _read(folder_or_id)
    if chat_template_file is not None:
        path = Path(chat_template_file)
        if not path.is_file():
            raise ValueError(f"chat template file {str(path)!r} does not exist")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {str(folder_or_id)!r} has no chat template; use the tokenizer of "
            "an instruction-tuned model, put a chat_template.jinja into the folder, or name a "
            "Jinja file: generator.chat_template.source='file' and "
            "generator.chat_template.name_or_path=FILE"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {str(folder_or_id)!r} has no end-of-sequence token, so a response "
            'could never end; set "eos_token" in its tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read(folder_or_id: str | Path) -> Any:
    from transformers import AutoTokenizer

    folder = local_folder(folder_or_id)
    if not _has_vocabulary(folder):
        raise ValueError(
            f"folder {str(folder)!r} holds no tokenizer: none of {', '.join(_VOCABULARY_FILES)} "
            "is in it; copy the tokenizer files of the model there"
        )
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and (problem := unfetched(path)):
            raise ValueError(f"{path} {problem}")
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # of a file that is not whole, whatever reads it
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer of {str(folder_or_id)!r} is code in that folder, which jaxrl does "
                "not run; give a folder whose tokenizer.json holds it"
            ) from error
        raise ValueError(
            f"the tokenizer of {str(folder_or_id)!r} cannot be read ({type(error).__name__}: "
            f"{error}); copy its files, and config.json beside them, again"
        ) from error


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARY_FILES)


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", folder_or_id: str | Path) -> None:
    """Refuse a second model, such as a reference, to which the tokens mean something else.

    Args:
        tokenizer: whose tokens it will score.
        folder_or_id: of the second model; a folder without a tokenizer is taken at its word.

    Raises:
        ValueError: a token has another id there.
    """
    field = "trainer.ref.model.path"
    check_folder(field, folder_or_id)
    if not _has_vocabulary(local_folder(folder_or_id)):
        return
    try:
        theirs = _read(folder_or_id).get_vocab()
    except ValueError as error:
        fail(field, str(folder_or_id), str(error))
    ours = tokenizer.get_vocab()
    different = [token for token in sorted(ours) if theirs.get(token) != ours[token]]
    if different:
        token = different[0]
        fail(
            field,
            str(folder_or_id),
            f"has another vocabulary than the policy: {len(different)} of {len(ours)} tokens "
            f"differ, e.g. {token!r} is {ours[token]} for the policy and {theirs.get(token)} "
            "there. Set a model with the policy's tokenizer",
        )


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    **chat_template_kwargs: Any,
) -> list[int]:
    """Tokenise a conversation in its chat template, up to where the assistant shall speak.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: `[{"role": "user", "content": "..."}, ...]`.
        **chat_template_kwargs: variables of the template, for example `enable_thinking=False`.
    """
    options = {"add_generation_prompt": True, **chat_template_kwargs}
    tokens = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=False, **options
    )
    return list(cast(list[int], tokens))


def after_user(tokenizer: "PreTrainedTokenizerBase", **chat_template_kwargs: Any) -> list[int]:
    """Return the tokens between the last words of a user and the first of the assistant.

    Args:
        tokenizer: with a chat template.
        **chat_template_kwargs: variables of the template.
    """
    options = {"add_generation_prompt": True, **chat_template_kwargs}
    said = [{"role": "user", "content": _WORDS}]
    text = str(tokenizer.apply_chat_template(said, tokenize=False, **options))
    _, words, rest = text.rpartition(_WORDS)
    if not words:
        raise ValueError("the chat template does not write what a user says")
    return list(tokenizer(rest, add_special_tokens=False)["input_ids"])


def character_tokenizer(
    alphabet: Sequence[str],
    *,
    generation_prompt: str = ">",
    eos_token: str = "<eos>",
    pad_token: str = "<pad>",
    unk_token: str = "<unk>",
) -> "PreTrainedTokenizerFast":
    """Make a tokenizer with one token per character, for models small enough to train in seconds.

    Token i is `alphabet[i]`; the three special tokens follow. Its chat template is the contents of
    the messages one after the other, then `generation_prompt`: the user message "3142" becomes
    "3142>". Decoding adds no spaces: `decode(encode(text)) == text` over the alphabet.

    Args:
        alphabet: the characters, each once; in a list also words, such as tags, that are one token.
        generation_prompt: what stands between prompt and response; characters of the alphabet.
        eos_token: ends a response.
        pad_token: fills rows.
        unk_token: stands for every character outside the alphabet.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet must name each character once and not be empty: {alphabet!r}")
    if not set(generation_prompt) <= set(alphabet):
        raise ValueError(
            f"generation_prompt {generation_prompt!r} has characters that are not in the alphabet"
        )
    vocabulary = {token: i for i, token in enumerate([*alphabet, eos_token, pad_token, unk_token])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unk_token))
    words = [re.escape(token) for token in alphabet if len(token) > 1]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*words, r"[\s\S]"])), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos_token,
        pad_token=pad_token,
        unk_token=unk_token,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHARACTER_TEMPLATE.format(prompt=json.dumps(generation_prompt))
    return tokenizer


def known_ids(tokenizer: Any) -> int:
    """Return how many ids a tokenizer has, with those of holes between them."""
    return 1 + max(tokenizer.get_vocab().values())


def unknown_token(tokenizer: Any) -> int | None:
    """Return the id that stands for text which the vocabulary lacks, if it stands for that alone.

    Some tokenizers that know every byte name their end of text as the unknown token.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return None if unknown in others else unknown


def unknown_text(tokenizer: Any, text: str) -> list[str]:
    """Return the pieces of a text that the vocabulary lacks, where the tokenizer can say so."""
    if not getattr(tokenizer, "is_fast", False):  # knows no offsets
        return []
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [text[slice(*at)] for token, at in pairs if token == tokenizer.unk_token_id]
