"""Which requests may take long to prepare."""

from __future__ import annotations

from collections import OrderedDict

from localgen.backends.types import EmbedRequest, Request, TokenizeRequest

AnyRequest = Request | EmbedRequest | TokenizeRequest

# longer prompts may take long; each message counts as so many characters
LONG_CHARS = 1 << 17
_MESSAGE_CHARS = 64
# a constraint that was prepared faster than this is not expected to take long
FAST_S = 0.05
_MAX_FAST_CONSTRAINTS = 1024


class PreparationCosts:
    """Tells which requests may take long to prepare. Not thread-safe.

    A constraint (grammar, regular expression, schema, tools) may, whatever its length, until a
    request with it was prepared within FAST_S.
    """

    def __init__(self) -> None:
        # hashes of constraints, least recently used first
        self._fast: OrderedDict[int, None] = OrderedDict()

    def may_take_long(self, request: AnyRequest) -> bool:
        constraint = _constraint_hash(request)
        is_unknown = constraint is not None and constraint not in self._fast
        return is_unknown or _num_chars(request) > LONG_CHARS

    def record(self, request: AnyRequest, seconds: float) -> None:
        """Record how long a valid request took."""
        constraint = _constraint_hash(request)
        if constraint is None or seconds > FAST_S:
            return
        self._fast[constraint] = None
        self._fast.move_to_end(constraint)
        if len(self._fast) > _MAX_FAST_CONSTRAINTS:
            self._fast.popitem(last=False)


def _constraint_hash(request: AnyRequest) -> int | None:
    if not isinstance(request, Request):
        return None
    params = request.params
    constraint = (params.json_schema, params.regex, params.grammar, request.tools)
    return hash(constraint) if any(constraint) else None


def _num_chars(request: AnyRequest) -> int:
    if isinstance(request, EmbedRequest):
        return sum(map(len, request.inputs)) + len(request.query or "") * len(request.inputs)
    if isinstance(request, TokenizeRequest):
        request = request.request
    messages = request.messages or ()
    in_messages = sum(len(message.content) + _MESSAGE_CHARS for message in messages)
    in_infill = request.infill.num_chars if request.infill else 0
    return in_messages + in_infill + len(request.prompt or request.prompt_tokens or ())
