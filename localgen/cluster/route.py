"""A request to be routed, what the router knows of it, and the choice of a replica."""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# of a replica's routing_stats: names of its loaded models; hashes of the chunks that it holds,
# joined, or None if it does not tell; where others fetch prefixes, by name of the model, which is
# empty for the one that all have
MODELS, HELD, KV_ADDRESSES = "models", "held", "kv_addresses"
# of its metadata: URL of its server, and where others fetched prefixes when it became ready
URL, KV_ADDRESS = "url", "kv_address"
# fewer chunks that another has are computed, which is as fast as to ask for them
MIN_FETCH_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for which a replica is chosen.

    chunks: of the prompt. model: its name, or empty. wanted: the replica that must answer, or None.
    """

    chunks: tuple[bytes, ...]
    model: str = ""
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, for the time of a request.

    url: of its server. kv_address: where others fetch prefixes from it, or empty. kv_peer: where it
    should fetch one from, or empty. new_chunks: of the prompt, that it has to compute.
    """

    replica: str
    url: str
    kv_address: str = ""
    kv_peer: str = ""
    new_chunks: int = 0


class InFlight:
    """The requests of one gateway in each replica.

    lock: of all that changes, since the router runs in another thread than the gateway.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.lock = threading.Lock()


@dataclass(slots=True)
class RoutedRequest:
    """The argument of choose_replica(): a request, and what the router finds out about it.

    chunks: of its prompt. model: its name, or empty for the one that all have. wanted: the replica
    that must answer, or None. gone: those that do not answer. in_flight: counts it from the moment
    it is routed, so that those which come at once are spread. cached: chunks that each replica has
    or was sent. sources: from which other the chosen one fetches the prompt, or empty.
    kv_addresses: of the model in each replica. assigned: the replica that it counts for, until it
    has ended.
    """

    chunks: tuple[bytes, ...] = ()
    model: str = ""
    wanted: str | None = None
    gone: frozenset[str] = frozenset()
    in_flight: InFlight = field(default_factory=InFlight)
    cached: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    kv_addresses: Mapping[str, str] = field(default_factory=dict)
    assigned: str | None = None
    has_ended: bool = False

    def assign(self, replica: str) -> None:
        """Count it for this replica. The router may do so after its client has left."""
        with self.in_flight.lock:
            if not self.has_ended:
                self._count(replica)

    def end(self) -> None:
        """Count it no more."""
        with self.in_flight.lock:
            self._count(None)
            self.has_ended = True

    def _count(self, replica: str | None) -> None:
        if self.assigned is not None:
            self.in_flight.counts[self.assigned] -= 1
        if replica is not None:
            self.in_flight.counts[replica] += 1
        self.assigned = replica

    def best_source(self, replica: str) -> tuple[str, int]:
        """Which other replica with an address has much more of the prompt, or empty, and how many
        chunks."""
        able = {name: count for name, count in self.cached.items() if self.kv_addresses.get(name)}
        best = max(able, key=able.__getitem__, default="")
        most = able.get(best, 0)
        is_much = most - self.cached.get(replica, 0) >= MIN_FETCH_CHUNKS
        return (best, most) if is_much else ("", 0)

    def choice(self, replica: str, url: str) -> Choice:
        """The replica that was chosen, and from which other it fetches the prompt, if any.

        All requests with a prompt that it fetches are told so, as they may arrive in another order
        than they were routed in.
        """
        best, most = self.best_source(replica)
        source = best or self.sources.get(replica, "")
        kv_peer = "" if source in self.gone else self.kv_addresses.get(source, "")
        has = max(self.cached.get(replica, 0), most if kv_peer else 0)
        kv_address = self.kv_addresses.get(replica, "")
        return Choice(replica, url, kv_address, kv_peer, len(self.chunks) - has)


def kv_address(model: str, metadata: Mapping[str, Any], stats: Mapping[str, Any]) -> str:
    """Where others fetch a model's prefixes from a replica, or empty.

    stats: routing_stats(), or nothing before its first report. metadata: of when it became ready;
    later, its engine may have got another address, or have ended.
    """
    if KV_ADDRESSES not in stats:
        return "" if model else str(metadata[KV_ADDRESS])
    addresses: Mapping[str, str] = stats[KV_ADDRESSES]
    return addresses.get(model, "")


def routing_stats(stats: Mapping[str, Any], own_names: Mapping[str, str] = {}) -> dict[str, Any]:
    """The routing statistics of a replica.

    stats: /v1/stats of its server. own_names: models of its aliases, presets and adapters.
    """
    names = set[str]()
    addresses: dict[str, str] = {}
    for model in stats["models"]:
        own = {model["name"], model["id"], *model.get("names", ())}
        own |= {name for name, base in own_names.items() if base in own}
        names |= own
        if address := model.get("kv_address"):
            addresses |= dict.fromkeys(own | ({""} if model["is_default"] else set()), address)
    held = [model["held_chunks"] for model in stats["models"] if "held_chunks" in model]
    is_known = len(held) == len(stats["models"])
    return {
        MODELS: sorted(names),
        KV_ADDRESSES: addresses,
        HELD: b"".join(map(base64.b64decode, held)) if is_known else None,
    }
