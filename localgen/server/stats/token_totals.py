"""Tokens of each account, as --rate-limit counts them."""

from __future__ import annotations

from collections import Counter

from localgen.server.stats.request_log import RequestRecord


def charged_tokens(record: RequestRecord) -> int:
    """The generated tokens of a request, and its prompt tokens that were not cached."""
    computed = 0 if record.total is None else record.total.timings.prompt_n
    return computed + record.num_tokens


class TokenTotals:
    """Observer of the request log that sums the tokens of each account since the start."""

    def __init__(self) -> None:
        self.by_account: Counter[str] = Counter()

    def on_request_end(self, record: RequestRecord) -> None:
        if record.account:
            self.by_account[record.account] += charged_tokens(record)
