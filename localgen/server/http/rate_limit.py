"""Rate limits: requests and tokens per minute of each account."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from localgen.server.http.access import RateLimit
from localgen.server.stats.request_log import RequestRecord
from localgen.server.stats.token_totals import charged_tokens

_MINUTE_S = 60.0
# above this number of buckets, full ones are dropped
_MAX_BUCKETS = 10_000


@dataclass(slots=True)
class TokenBucket:
    """A token bucket that refills at `capacity` per minute. The level may become negative."""

    capacity: float
    level: float
    refilled_s: float

    def refill(self, now_s: float) -> None:
        gained = (now_s - self.refilled_s) * self.capacity / _MINUTE_S
        self.level, self.refilled_s = min(self.capacity, self.level + gained), now_s

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available; 0 if it is now."""
        return max(0.0, (amount - self.level) * _MINUTE_S / self.capacity)


class RateLimiter:
    """Buckets per account. Requests are charged on admission, tokens when a request ends."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    def admit(self, account: str) -> float | None:
        """Charge a request. Returns None, or the seconds to wait if the limit is reached."""
        waits = []
        requests = self._bucket(self._requests, account, self._limit.requests)
        if requests is not None:
            waits.append(requests.wait_s(1))
        tokens = self._bucket(self._tokens, account, self._limit.tokens)
        if tokens is not None:
            waits.append(tokens.wait_s(1))
        if any(waits):
            return max(waits)
        if requests is not None:
            requests.level -= 1
        return None

    def on_request_end(self, record: RequestRecord) -> None:
        """Charge the tokens of a request."""
        if record.account:
            self.charge(record.account, charged_tokens(record))

    def charge(self, account: str, num_tokens: int) -> None:
        """Charge tokens that were computed."""
        bucket = self._bucket(self._tokens, account, self._limit.tokens)
        if bucket is not None:
            bucket.level -= num_tokens

    def _bucket(
        self, buckets: dict[str, TokenBucket], account: str, size: int | None
    ) -> TokenBucket | None:
        if size is None:
            return None
        now_s = self._clock()
        if len(buckets) > _MAX_BUCKETS:
            for name, bucket in list(buckets.items()):
                bucket.refill(now_s)
                if bucket.level >= bucket.capacity:
                    del buckets[name]
        found = buckets.setdefault(account, TokenBucket(size, size, now_s))
        found.refill(now_s)
        return found
