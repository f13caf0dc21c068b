"""Prompts of infill (fill in the middle): a model writes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.types import Infill

# the texts of each token in the vocabularies of model families, as llama.cpp knows them
_PREFIX = (
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>"),
    *("<PRE>", "▁<PRE>", "<|code_prefix|>"),
)
_SUFFIX = (
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>"),
    *("<SUF>", "▁<SUF>", "<|code_suffix|>"),
)
_MIDDLE = (
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>"),
    *("<MID>", "▁<MID>", "<|code_middle|>"),
)
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE = ("<|file_sep|>",)
# names as llama-server gives them, which does not know the real ones
_REPOSITORY_NAME = "myproject\n"
_FILE_NAME = "filename\n"
# between files, where the model has no token for it
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """Ids of a model's tokens for infill. repository, file: None if it has none."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None

    def prompt(self, before: list[int], infill: Infill, encode: Encode) -> list[int]:
        """The prompt, without a begin-of-sequence token: other files, prefix, suffix, middle.

        before: the tokens of the prefix. encode: encodes a text without that token.
        """
        return [
            *self._files(infill, encode),
            self.prefix,
            *before,
            self.suffix,
            *encode(infill.suffix),
            self.middle,
        ]

    def _files(self, infill: Infill, encode: Encode) -> list[int]:
        if not infill.files:
            return []
        tokens = [] if self.repository is None else [self.repository, *encode(_REPOSITORY_NAME)]
        for file in infill.files:
            tokens += self._file_head(f"{file.name}\n", encode) + encode(file.text)
        return tokens if self.file is None else tokens + self._file_head(_FILE_NAME, encode)

    def _file_head(self, name: str, encode: Encode) -> list[int]:
        return encode(_SNIPPET) if self.file is None else [self.file, *encode(name)]


Encode = Callable[[str], list[int]]


def infill_tokens(
    prefix: int | None,
    suffix: int | None,
    middle: int | None,
    *,
    repository: int | None = None,
    file: int | None = None,
) -> InfillTokens | None:
    """The tokens of a model, or None if it lacks one of the first three."""
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(
        prefix=prefix, suffix=suffix, middle=middle, repository=repository, file=file
    )


def find_infill_tokens(
    find: Callable[[str], int | None], known: Callable[[str], int | None] = lambda name: None
) -> InfillTokens | None:
    """The tokens of a vocabulary, or None if it has none for infill.

    find: the id of a token's text. known: the id that a model file gives for pre, suf, mid, rep or
    sep, which is preferred.
    """

    def token(name: str, texts: tuple[str, ...]) -> int | None:
        given = known(name)
        found = (find(text) for text in texts)
        return next((each for each in found if each is not None), None) if given is None else given

    return infill_tokens(
        token("pre", _PREFIX),
        token("suf", _SUFFIX),
        token("mid", _MIDDLE),
        repository=token("rep", _REPOSITORY),
        file=token("sep", _FILE),
    )
