"""The engine's Tokenizer, on top of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import tokenizers

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.hf.folder import read_json, read_optional_json
from localgen.backends.infill import find_infill_tokens
from localgen.backends.sandbox import LimitExceeded, Sandbox
from localgen.backends.sandbox_worker import CallLimits

_SPACE = "▁"
# generous multiples of what the library needs per byte of a file and per character of a text
_LOAD_BYTES_PER_BYTE = 60
_LOAD_BYTES_PER_S = 1_000_000
_ENCODE_BYTES_PER_CHAR = 4096
_ENCODE_CHARS_PER_S = 100_000


class TextEncoder(Protocol):
    """Converts text to token ids. add_special: as in `tokenizers.Tokenizer.encode`."""

    def encode(self, text: str, add_special: bool) -> list[int]: ...


class LibraryEncoder:
    """A TextEncoder in this process, without limits of time and memory."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_file(cls, path: Path) -> LibraryEncoder:
        return cls(_read_file(path))

    def encode(self, text: str, add_special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids


class SandboxedEncoder:
    """A TextEncoder in a sandbox, as a tokenizer.json has regular expressions of its own.

    Raises LoadFailed if the file is damaged or exceeds the limits.
    """

    def __init__(self, sandbox: Sandbox, path: Path) -> None:
        size = path.stat().st_size
        limits = CallLimits(
            seconds=10 + size / _LOAD_BYTES_PER_S,
            memory_bytes=(512 << 20) + size * _LOAD_BYTES_PER_BYTE,
        )
        try:
            self._encoder = sandbox.create(limits, LibraryEncoder.from_file, path)
        except LimitExceeded as error:
            raise LoadFailed(f"cannot load {path}: loading it {error}") from error

    def encode(self, text: str, add_special: bool) -> list[int]:
        limits = CallLimits(
            seconds=2 + len(text) / _ENCODE_CHARS_PER_S,
            memory_bytes=(512 << 20) + len(text) * _ENCODE_BYTES_PER_CHAR,
        )
        try:
            ids: list[int] = self._encoder.call(limits, "encode", text, add_special)
        except LimitExceeded as error:
            raise InvalidRequest(
                f"tokenizing the prompt {error}: shorten it, or check the model's tokenizer.json"
            ) from error
        return ids


class HfTokenizer:
    """A thread-safe Tokenizer.

    source: file to name in errors. vocab_size: rows of the embedding, which may exceed the number
    of tokens; LoadFailed is raised if it is smaller. bos, eos: as in Tokenizer. byte_level: tokens
    are spelled in GPT-2's byte alphabet. hidden_ids: tokens without text, besides special ones.
    encoder: encodes in place of the tokenizer, with the same result. infill: ids by name, as
    find_infill_tokens takes them.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        source: Path,
        vocab_size: int,
        bos: str,
        eos: str,
        end_ids: frozenset[int],
        add_bos: bool,
        byte_level: bool,
        hidden_ids: frozenset[int] = frozenset(),
        encoder: TextEncoder | None = None,
        infill: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        if tokenizer.get_vocab_size() > vocab_size:
            raise LoadFailed(
                f"cannot load {source}: it has {tokenizer.get_vocab_size():,} tokens, "
                f"the model {vocab_size:,}"
            )
        self._tokenizer = tokenizer
        self._encoder = encoder or LibraryEncoder(tokenizer)
        self.vocab_size = vocab_size
        self.bos, self.eos = bos, eos
        self.eos_token_ids = end_ids
        self._bos_id = tokenizer.token_to_id(bos) if bos else None
        self._add_bos = add_bos and self._bos_id is not None
        self._byte_level = byte_level
        added = tokenizer.get_added_tokens_decoder()
        self._hidden_ids = hidden_ids.union(token for token, what in added.items() if what.special)
        self._added = {token: what.content for token, what in added.items()}
        self.infill_tokens = find_infill_tokens(tokenizer.token_to_id, infill.get)

    @classmethod
    def from_folder(
        cls, folder: Path, vocab_size: int, sandbox: Sandbox | None = None
    ) -> HfTokenizer:
        """Load a folder's tokenizer. Raises LoadFailed if a file is missing or damaged.

        sandbox: where text is encoded, or None to run in this process, without limits.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LoadFailed(f"cannot load {folder}: it has no tokenizer.json")
        # in the sandbox first: loading, too, may take time and memory without limits
        encoder = None if sandbox is None else SandboxedEncoder(sandbox, path)
        tokenizer = _read_file(path)
        settings = read_optional_json(folder / "tokenizer_config.json")
        bos, eos = _special_token(settings, "bos_token"), _special_token(settings, "eos_token")
        starts = tokenizer.encode("", add_special_tokens=True).ids[:1]
        add_bos_setting = settings.get("add_bos_token")
        return cls(
            tokenizer,
            source=path,
            vocab_size=vocab_size,
            bos=bos,
            eos=eos,
            end_ids=_end_ids(folder, tokenizer, eos),
            add_bos=bool(add_bos_setting) or (bool(bos) and starts == [tokenizer.token_to_id(bos)]),
            byte_level='"ByteLevel"' in json.dumps(read_json(path).get("decoder")),
            encoder=encoder,
        )

    def encode(self, text: str) -> list[int]:
        """Implements Tokenizer.encode. Raises InvalidRequest if the text has no UTF-8 form."""
        return self._encode(text, add_special=False)

    def encode_for_embedding(self, text: str) -> list[int]:
        return self._encode(text, add_special=True)

    def _encode(self, text: str, *, add_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode: {error}") from error
        ids = self._encoder.encode(text, add_special)
        if self._add_bos and ids[:1] != [self._bos_id]:
            assert self._bos_id is not None
            ids.insert(0, self._bos_id)
        return ids

    def piece(self, token: int) -> bytes:
        return b"" if token in self._hidden_ids else self.id_to_token(token)

    def id_to_token(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # a row of the embedding without a token
            return b""
        if self._byte_level:
            return bytes(_BYTE_DECODER[char] for char in text if char in _BYTE_DECODER)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace(_SPACE, " ").encode()


def _read_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise LoadFailed(f"cannot load {path}: {error}") from None


def _end_ids(folder: Path, tokenizer: tokenizers.Tokenizer, eos: str) -> frozenset[int]:
    found = {tokenizer.token_to_id(eos)} if eos else set()
    for name in ("config.json", "generation_config.json"):
        ends = read_optional_json(folder / name).get("eos_token_id")
        listed = ends if isinstance(ends, list) else [ends]
        found.update(token for token in listed if isinstance(token, int))
    return frozenset(token for token in found if token is not None)


def _unicode_to_bytes() -> dict[str, int]:
    """GPT-2's printable character for every byte (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


_BYTE_DECODER = _unicode_to_bytes()


def _special_token(settings: dict[str, Any], name: str) -> str:
    """A special token, given as text or as an object."""
    value = settings.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    if not isinstance(value, str):
        return ""
    # JSON may hold half of a surrogate pair, which no vocabulary has
    return value.encode(errors="ignore").decode()
