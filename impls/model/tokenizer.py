"""Text to token ids and back, as the model itself does it, from a Hugging Face folder or a GGUF file.

A GGUF file names the rule by which text is cut before the byte-pair merges (`tokenizer.ggml.pre`); the wrong rule gives
ids that look right and are not, so one that is not known here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impls.model.errors import ModelError, need
from impls.model.gguf_file import read_gguf

# How Llama 3 cuts text, from the tokenizer.json of the model (the first rule, contractions, in any case of letters).
_LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "smollm")

_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Tokenizer:
    """A model's own tokenizer.

    bos_id: id put before a text, None when the model has none. eos_ids: ids after which generation ends.
    """

    backend: Any = field(repr=False)
    bos_id: int | None
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in the text become their ids.

        Args:
            text: any text.
            special: add what the model puts around every text (for Llama 3 a beginning-of-text id).
        """
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of the ids; bytes that are no valid UTF-8 become U+FFFD.

        Raises:
            ModelError: an id outside the vocabulary.
        """
        for token in ids:
            if token < 0 or self.backend.id_to_token(int(token)) is None:
                raise ModelError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return str(self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special))

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder for one sequence that arrives token by token."""
        return TextStream(self, skip_special)


class TextStream:
    """Turns tokens into text as they come, holding back a character until all of its bytes are there.

    The pieces returned, one after another, are the text of the whole sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # The tokens given out last stay, since some decoders need them to place a space; then those held back.
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        self._held.append(token)
        text = self._new_text()
        if text.endswith("\ufffd"):
            return ""
        self._given, self._held = self._held, []
        return text

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        text = self._new_text() if self._held else ""
        self._given, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._given, skip_special=self._skip)
        return self._tokenizer.decode(self._given + self._held, skip_special=self._skip)[len(before) :]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json), of a GGUF file, or of a folder with one GGUF file.

    Raises:
        ModelError: nothing of the kind there, a damaged file, or a way of cutting text that is not known (named).
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if path.is_file() and path.suffix in (".json", ".safetensors"):
        path = path.parent
    if path.is_file():
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return _from_hf(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _from_gguf(found[0])
    raise ModelError(f"{path}: no tokenizer.json (a tokenizer.model alone is not read) and no single GGUF file")


def _from_hf(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        backend = need("tokenizers").Tokenizer.from_file(str(file))
    except ModelError:
        raise
    except Exception as error:  # the package raises bare Exception on a damaged file
        raise ModelError(f"{file}: not a tokenizer ({error})") from error
    # A saved file may say how to cut and pad batches; a single text must not be touched by it.
    backend.no_truncation()
    backend.no_padding()
    settings = {
        name: _json(folder / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    }
    bos = _token_id(backend, settings["tokenizer_config.json"].get("bos_token"))
    eos = {_token_id(backend, settings["tokenizer_config.json"].get("eos_token"))}
    for name in ("generation_config.json", "config.json"):
        declared = settings[name].get("eos_token_id")
        if declared is not None:
            eos.update(declared if isinstance(declared, list) else [declared])
            break
    return Tokenizer(backend, bos, frozenset(token for token in eos if token is not None))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return raw


def _token_id(backend: Any, token: Any) -> int | None:
    """Id of a token given as its text or as an entry with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(text) if isinstance(text, str) else None
    return None if found is None else int(found)


def _from_gguf(path: Path) -> Tokenizer:
    tokenizers = need("tokenizers")
    metadata = read_gguf(path).metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(f"{path}: tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{path}: pre-tokenizer {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)}")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not isinstance(metadata.get(key), list):
            raise ModelError(f"{path}: the metadata entry {key!r} is missing")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelError(f"{path}: the vocabulary holds {twice!r} twice")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        # Llama 3 takes a piece that is a token as it stands, whether or not the merges lead there.
        bpe = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the package raises bare Exception on merges that name no token
        raise ModelError(f"{path}: the merges do not fit the vocabulary ({error})") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(str(pre))
    backend.decoder = tokenizers.decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        add([_added(tokens[i], special=kind == _CONTROL) for i, found in enumerate(kinds) if found == kind])
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    before = [ids["bos"]] if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") else []
    after = [ids["eos"]] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    _surround(backend, tokens, before, after, path)
    ends = [ids["eos"], ids["eot"], ids["eom"]]
    return Tokenizer(backend, ids["bos"], frozenset(int(token) for token in ends if token is not None))


def _pre_tokenizer(pre: str) -> Any:
    """gpt-2: the GPT-2 pattern. smollm: every digit apart, then that pattern. llama-bpe: Llama 3's pattern."""
    rules = need("tokenizers").pre_tokenizers
    if pre == "llama-bpe":
        pattern = need("tokenizers").Regex(_LLAMA3_PIECES)
        byte_level = rules.ByteLevel(add_prefix_space=False, use_regex=False)
        return rules.Sequence([rules.Split(pattern, behavior="isolated"), byte_level])
    byte_level = rules.ByteLevel(add_prefix_space=False, use_regex=True)
    return rules.Sequence([rules.Digits(individual_digits=True), byte_level]) if pre == "smollm" else byte_level


def _added(token: str, *, special: bool) -> Any:
    return need("tokenizers").AddedToken(token, special=special, normalized=False)


def _surround(backend: Any, tokens: list[str], before: Iterable[Any], after: Iterable[Any], path: Path) -> None:
    """Put special tokens around every text that is encoded with them."""
    around = [*before, *after]
    if any(not isinstance(index, int) or not 0 <= index < len(tokens) for index in around):
        raise ModelError(f"{path}: asks for a beginning or end token on every text, but names no such token")
    if not around:
        return
    template = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
    backend.post_processor = need("tokenizers").processors.TemplateProcessing(
        single=template, special_tokens=[(tokens[i], i) for i in dict.fromkeys(around)]
    )
