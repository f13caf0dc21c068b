"""Convert and validate grammars of clients with llguidance, within limits of time and memory.

Compiling a grammar may take time that is quadratic in its size, or far more, and llguidance's own
limits count neither. Hence it is first compiled in the sandbox.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from types import ModuleType

from localgen.backends.errors import InvalidRequest
from localgen.backends.sandbox import LimitExceeded, Sandbox, Sandboxed
from localgen.backends.sandbox_worker import CallLimits
from localgen.backends.text.lark_grammar import WHITESPACE

MAX_GRAMMAR_CHARS = 1 << 20
# compiling it again for the model's vocabulary takes about twice as long
_CHECK_LIMITS = CallLimits(seconds=1.0)
_IMPORT_LIMITS = CallLimits(seconds=30.0)
_MAX_VALIDATED = 1024
# the regular expression again, with a mark below the error
_REGEX_DRAWING = re.compile(r" \(in regex\): regex parse error:\n.*?\nerror: ", re.DOTALL)
_POSITION = re.compile(r"^at \d+\(\d+\): ")


class LlguidanceChecker:
    """Converts and validates in this process, without limits."""

    def __init__(self) -> None:
        import llguidance
        from llguidance import gbnf_to_lark

        self._llguidance: ModuleType = llguidance
        # llguidance 1.9 drops the brackets of a repeated repetition: ([a-z]+)? becomes [a-z]+?
        setattr(gbnf_to_lark.RepetitionNode, "is_atomic", lambda node: False)  # noqa: B010

    def convert(self, kind: str, text: str) -> str:
        """Convert a grammar to llguidance's format. Raises InvalidRequest."""
        try:
            if kind == "json_schema":
                return str(
                    self._llguidance.LLMatcher.grammar_from_json_schema(
                        text, defaults={"whitespace_pattern": WHITESPACE}
                    )
                )
            name = "regex" if kind == "regex" else "gbnf"
            return str(self._llguidance.grammar_from(name, text))
        except ValueError as error:
            raise invalid_grammar(kind, str(error)) from error

    def validate(self, kind: str, grammar: str) -> None:
        """Raise InvalidRequest if a converted grammar is invalid."""
        reason = self._llguidance.LLMatcher.validate_grammar(grammar)
        if reason:
            raise invalid_grammar(kind, reason)


class GrammarChecker:
    """Converts and validates grammars in a sandbox. Thread-safe.

    sandbox: None: in this process, without limits. Grammars known to be valid are not compiled
    again.
    """

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._sandboxed: Sandboxed | None = None
        self._validated: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def convert(self, kind: str, text: str) -> str:
        """Convert a grammar to llguidance's format. Raises InvalidRequest.

        kind: the field of SamplingParams that it was given in.
        """
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"{kind} has more than {MAX_GRAMMAR_CHARS:,} characters", param=kind
            )
        return str(self._call("convert", kind, text))

    def validate(self, kind: str, grammar: str) -> None:
        """Raise InvalidRequest if a converted grammar is invalid or takes long to compile."""
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._validated:
                self._validated.move_to_end(key)
                return
        self._call("validate", kind, grammar)
        with self._lock:
            self._validated[key] = None
            if len(self._validated) > _MAX_VALIDATED:
                self._validated.popitem(last=False)

    def _call(self, method: str, kind: str, text: str) -> object:
        if self._sandbox is None:
            return getattr(LlguidanceChecker(), method)(kind, text)
        try:
            with self._lock:
                if self._sandboxed is None:
                    self._sandboxed = self._sandbox.create(_IMPORT_LIMITS, LlguidanceChecker)
            return self._sandboxed.call(_CHECK_LIMITS, method, kind, text)
        except LimitExceeded as error:
            raise InvalidRequest(
                f"{kind}: compiling it {error}: simplify it", param=kind
            ) from error


def validate_grammar(kind: str, text: str) -> None:
    """Raise InvalidRequest if a grammar is invalid or takes long to compile, as the engines do.

    kind: the field of SamplingParams that it was given in. It starts a sandbox, in 0.3 s.
    """
    checker = GrammarChecker(Sandbox())
    checker.validate(kind, checker.convert(kind, text))


def invalid_grammar(kind: str, reason: str) -> InvalidRequest:
    """The error for a grammar. reason: llguidance's, shown in one line."""
    reason = _REGEX_DRAWING.sub(": ", reason)
    if kind == "regex":  # it is in a grammar of one line, which the user has not written
        reason = _POSITION.sub("", reason.partition("\n")[0])
    text = " ".join(reason.split())[:500]
    if "panic" in text[:40].lower():
        text = f"it is too large or not supported: simplify it ({text})"
    return InvalidRequest(f"{kind}: {text}", param=kind)
