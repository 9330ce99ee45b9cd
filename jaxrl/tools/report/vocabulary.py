"""Decode the tokens of a run, each by itself.

A token of a byte-level vocabulary may be a part of a character. It is kept as its bytes, and
`page.js` decodes the bytes of a whole response, so that every token has its place in the text.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.tools.report.run_files import RunFiles

if TYPE_CHECKING:  # 0.1 s: a page without texts needs none
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Number the tokens of a page in the order in which they are first met.

    Args:
        tokenizer: None = what tokens say is not known, they are shown by their ids.

    Attributes:
        ids: of the tokens; entries: what each says, text or [bytes].
        special: numbers of the special ones.
        cost: bytes of the page that they take at most.
    """

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        self.tokenizer = tokenizer
        self._numbers = np.zeros(0, np.int64)
        self.ids: list[int] = []
        self.entries: list[str | list[int]] = []
        self.special: list[int] = []
        self._bytes: list[bytes] = []
        self.cost = 0
        self._special_ids: set[int] = set()
        self._alphabet: dict[str, int] = {}
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._special_ids = {i for i, token in added.items() if token.special}
            self._alphabet = byte_alphabet() if _is_byte_level(tokenizer) else {}

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of tokens, some new: [n] int to [n] uint16, or uint32 if need be."""
        if not ids.size:
            return ids.astype(np.uint16)
        if ids.max() >= len(self._numbers):
            grown = np.full(int(ids.max()) + 1024, -1)
            grown[: len(self._numbers)] = self._numbers
            self._numbers = grown
        new, first = np.unique(ids[self._numbers[ids] < 0], return_index=True)
        for token in new[np.argsort(first)].tolist():
            self._add(token)
        found = self._numbers[ids]
        return found.astype(np.uint16 if found.max() < 2**16 else np.uint32)

    def text(self, ids: np.ndarray) -> str:
        """Return the text of tokens [n] int, as the page shows it but for what cannot be seen."""
        own = self._bytes
        return b"".join(own[number] for number in self.numbers(ids).tolist()).decode(
            errors="replace"
        )

    def _add(self, token: int) -> None:
        self._numbers[token] = len(self.ids)
        entry = self._entry(token)
        if token in self._special_ids:
            self.special.append(len(self.ids))
        self.ids.append(token)
        self.entries.append(entry)
        self._bytes.append(entry.encode() if isinstance(entry, str) else bytes(entry))
        self.cost += len(json.dumps(entry)) + len(f"{token},{len(self.ids)},")

    def _entry(self, token: int) -> str | list[int]:
        if self.tokenizer is None:
            return f"\u27e8{token}\u27e9"
        piece = self.tokenizer.id_to_token(token)
        if piece is None:  # beyond the vocabulary: rows that pad an embedding
            return f"\u27e8{token}\u27e9"
        if token in self._special_ids:
            return piece
        if self._alphabet and all(char in self._alphabet for char in piece):
            return _text_or_bytes(bytes(self._alphabet[char] for char in piece))
        if match := _BYTE.fullmatch(piece):
            return _text_or_bytes(bytes([int(match[1], 16)]))
        return _difference(self.tokenizer, token)


def _difference(tokenizer: "Tokenizer", token: int) -> str:
    """Return what a token adds to itself.

    Decoders treat the first one of a text in another way.
    """
    once = tokenizer.decode([token], skip_special_tokens=False)
    return tokenizer.decode([token, token], skip_special_tokens=False)[len(once) :]


def tokenizer_of(run: RunFiles, folder: str | None) -> "Tokenizer | None":
    """Return the tokenizer of a run: of its policy's model, or of an export; None without.

    The export is one that the run made.

    Args:
        folder: given by the user, instead of these.

    Raises:
        ValueError: the given one cannot be read.
    """
    if folder is not None:
        return _load(folder, run)
    model = run.group("trainer", "policy", "model").get("path")
    exports = run.trainer.get("export_path")
    found = sorted(Path(str(exports)).glob("global_step_*/policy/tokenizer_config.json"))
    places = [model, *(str(path.parent) for path in found[-1:])]
    reason = "its config names none"
    for place in filter(None, places):
        try:
            return _load(place, run)
        except Exception as error:  # of the hub's client or of files, whatever they are
            reason = " ".join(str(error).split())[:200]
    run.notes.append(
        f"no tokenizer, tokens are shown by their ids ({reason}); name its folder with --tokenizer"
    )
    return None


def _load(place: str, run: RunFiles) -> "Tokenizer":
    if (path := Path(place) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    # Of the hub, or of another form: transformers, which takes seconds to import, can read it.
    from jaxrl.data.tokenizer import load_tokenizer

    template = run.group("generator", "chat_template")
    from_file = template.get("source") == "file"
    loaded: Any = load_tokenizer(place, template["name_or_path"] if from_file else None)
    return loaded.backend_tokenizer


def byte_alphabet() -> dict[str, int]:
    """Return the characters of byte-level vocabularies and the byte that each stands for.

    GPT-2's table (Radford et al., 2019): printable bytes of Latin-1 stand for themselves, the
    others for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _is_byte_level(tokenizer: "Tokenizer") -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _text_or_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
