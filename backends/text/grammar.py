"""Grammar-constrained decoding with llguidance: which tokens are allowed next."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import GRAMMAR_FIELDS, SamplingParams
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.grammar_check import GrammarChecker, invalid_grammar
from localgen.backends.text.lark_grammar import CONTENT_RULE, TOOL_SCHEMA_OPTIONS, ResponseGrammar
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.text.tool_format import arguments_schema
from localgen.backends.types import Tool

_NO_TOKENS: frozenset[int] = frozenset()


class GrammarMatcher:
    """State of one response in its grammar. Not thread-safe."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_done(self) -> bool:
        """True if no token can follow."""
        return bool(self._matcher.is_stopped())

    def allowed_mask(self, banned: frozenset[int] = _NO_TOKENS) -> NDArray[np.bool_]:
        """Return a mask of the allowed next tokens, bool [vocab]; all False if no token can follow.

        banned: tokens to exclude, unless the grammar allows no others.
        """
        if self.is_done:
            return np.zeros(self._vocab_size, np.bool_)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, bitorder="little")
        allowed = np.zeros(self._vocab_size, np.bool_)
        count = min(len(bits), self._vocab_size)
        allowed[:count] = bits[:count]
        if not banned:
            return allowed
        others = allowed.copy()
        others[list(banned)] = False
        return others if others.any() else allowed

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)

    def accept_all(self, tokens: Seq[int]) -> bool:
        """Advance by these tokens if all are allowed in this order; else return False."""
        if self._matcher.validate_tokens(list(tokens)) < len(tokens):
            return False
        return bool(self._matcher.consume_tokens(list(tokens)))

    def draft_masks(
        self, drafts: list[int], banned: Callable[[int], frozenset[int]] = lambda ahead: _NO_TOKENS
    ) -> list[NDArray[np.bool_]]:
        """Return the masks before and after each draft token, without advancing.

        After the first draft token that is not allowed, the masks allow everything: those positions
        are discarded. banned: as in `allowed_mask`, given the number of draft tokens before the
        position.
        """
        copy = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)
        masks = [copy.allowed_mask(banned(0))]
        for draft in drafts:
            if not masks[-1][draft]:
                break
            copy.accept(draft)
            masks.append(copy.allowed_mask(banned(len(masks))))
        anything = np.ones(self._vocab_size, np.bool_)
        return masks + [anything] * (1 + len(drafts) - len(masks))


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe.

    sandbox: where a grammar is compiled first, within limits of time and memory, or None if
    nowhere.
    """

    def __init__(self, tokenizer: Tokenizer, sandbox: Sandbox | None = None) -> None:
        self._tokenizer = tokenizer
        self._checker = GrammarChecker(sandbox)
        self._cached_tokenizer: Any = None
        self._lock = threading.Lock()

    def compile(
        self, params: SamplingParams, response_grammar: ResponseGrammar | None = None
    ) -> GrammarMatcher | None:
        """Return a matcher for the requested grammar, or None if there is none.

        response_grammar: reasoning and tool calls that may surround the constrained content. Raises
        InvalidRequest if several grammars are given or one is invalid, with the reason.
        """
        given = [name for name in GRAMMAR_FIELDS if getattr(params, name) is not None]
        has_tools = response_grammar is not None and response_grammar.call_format is not None
        if has_tools:
            given.append("tools")
        if not given:
            return None
        if len(given) > 1 and given != ["json_schema", "tools"]:
            raise InvalidRequest(f"give only one of {', '.join(given)}", param=given[1])
        if params.ignore_eos:
            raise InvalidRequest(f"ignore_eos cannot be used with {given[0]}", param="ignore_eos")
        kind = given[0]
        grammar = None if kind == "tools" else self._checker.convert(kind, getattr(params, kind))
        lark = (
            response_grammar.to_lark(constrain_content=grammar is not None)
            if response_grammar is not None
            else None
        )
        if lark is None:
            assert grammar is not None
            return self._compile(kind, grammar)
        if grammar is not None:
            self._compile(kind, grammar)  # report errors for it alone, before it is combined
        try:
            return self._compile("tools" if has_tools else kind, _combine_grammars(lark, grammar))
        except InvalidRequest:
            for tool in response_grammar.tools if response_grammar else ():
                self._validate_tool_schema(tool)
            raise

    def _validate_tool_schema(self, tool: Tool) -> None:
        """Raise InvalidRequest if the tool's JSON schema is invalid."""
        schema = arguments_schema(tool) | {"x-guidance": TOOL_SCHEMA_OPTIONS}
        try:
            self._compile("json_schema", self._checker.convert("json_schema", json.dumps(schema)))
        except InvalidRequest as error:
            reason = error.message.removeprefix("json_schema: ")
            raise InvalidRequest(
                f"the parameters of {tool.name}: {reason}", param="tools"
            ) from error

    def _compile(self, kind: str, grammar: str) -> GrammarMatcher:
        import llguidance

        self._checker.validate(kind, grammar)
        try:
            matcher = llguidance.LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0)
        except ValueError as error:
            raise invalid_grammar(kind, str(error)) from error
        if matcher.is_error():
            raise invalid_grammar(kind, matcher.get_error())
        found = GrammarMatcher(matcher, self._tokenizer.vocab_size)
        if matcher.is_accepting() and not self._can_begin(found):
            raise InvalidRequest(f"{kind}: it allows an empty answer only", param=kind)
        return found

    def _can_begin(self, matcher: GrammarMatcher) -> bool:
        """True if a token with text can come first."""
        allowed = matcher.allowed_mask()
        allowed[list(self._tokenizer.eos_token_ids)] = False
        return bool(allowed.any())

    def _llguidance_tokenizer(self) -> Any:
        """Return the vocabulary for llguidance; built once, which takes up to a second."""
        import llguidance

        with self._lock:
            if self._cached_tokenizer is None:
                ends = sorted(self._tokenizer.eos_token_ids)
                self._cached_tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_LlguidanceTokenizer(self._tokenizer)),
                    n_vocab=self._tokenizer.vocab_size,
                    eos_token=ends or None,
                )
            return self._cached_tokenizer


class _LlguidanceTokenizer:
    """A tokenizer for llguidance.TokenizerWrapper. b"\\xff" marks special tokens, without text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = map(tokenizer.piece, range(tokenizer.vocab_size))
        self.tokens = [piece or b"\xff[%d]" % token for token, piece in enumerate(pieces)]
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = None
        self.special_token_ids = [
            token for token, piece in enumerate(self.tokens) if piece.startswith(b"\xff[")
        ]
        self._tokenizer = tokenizer
        self._start = len(tokenizer.encode(""))

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text)[self._start :]


def _combine_grammars(lark: str, content_grammar: str | None) -> str:
    """Combine the grammar of the response with the grammar of its content."""
    grammars = [{"lark_grammar": lark}]
    if content_grammar is not None:
        inner = {"lark_grammar": content_grammar}
        if content_grammar.lstrip().startswith("{"):
            inner = json.loads(content_grammar)["grammars"][0]
        grammars.append(inner | {"name": CONTENT_RULE.removeprefix("@")})
    return json.dumps({"grammars": grammars})
