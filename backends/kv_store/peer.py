"""Blocks from another engine of the same model: it listens at an address, and others fetch.

Both sides prove that they have the same key before anything else is said. What is sent is a block
as in a file, with its HMAC. Nothing is encrypted.

After the proof a client sends `*` and gets the namespace of the engine's blocks. If that is its
own, it sends `?` and digests, and gets the number of leading ones that the engine has (4 bytes,
little-endian). Or it sends `>` and a digest, and gets digest, number of tokens (4 bytes) and tokens
(int32) of each block behind that one. Or it sends `=` and a digest, and gets the block, or nothing
if it is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.address import Address, Connector, address_text, listen
from localgen.backends.kv_store.block_file import BlockRefused
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, DIGEST_BYTES, KVBlock, TokenArray
from localgen.backends.kv_store.fingerprint import namespace_difference
from localgen.backends.messages import FrameSocket

_NONCE_BYTES = 32
_NAMESPACE, _ASK, _CHILDREN, _FETCH = b"*", b"?", b">", b"="
_COUNT_BYTES = 4
# of the many prompts that begin alike, a peer is told of this many
_MAX_CHILDREN = 256
# a prompt of a million tokens has half of these
_MAX_DIGESTS = 1 << 14
_MAX_REQUEST_BYTES = 1 + DIGEST_BYTES * _MAX_DIGESTS
# to and from other engines: one file descriptor and, at the server, one thread each
MAX_PEERS = 64
# to connect, with the proof; the engine waits meanwhile
_CONNECT_S = 1.0
# of a reply: this, and as long as its bytes take at this rate
_REPLY_S = 2.0
_MIN_BYTES_PER_S = 4e6
# after a connection could not be taken
_PAUSE_S = 0.2
# a client that asks nothing for this time is disconnected; it connects again when it needs to
_IDLE_S = 60.0
# a peer that failed is left alone for this time
RETRY_S = 10.0
_log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """The blocks of an engine. May be called from any thread."""

    def has(self, digest: bytes) -> bool: ...

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks behind a block."""
        ...

    def get(self, digest: bytes) -> KVBlock | None: ...


class PeerServer:
    """Serves the blocks of one engine to peers that have the key.

    address: where it listens, with the port that it got. Raises OSError if the address cannot be
    used.
    """

    def __init__(
        self,
        address: Address,
        namespace: bytes,
        key: bytes,
        source: BlockSource,
    ) -> None:
        self._namespace, self._key, self._source = namespace, key, source
        self._free = threading.Semaphore(MAX_PEERS)
        self._address, self._is_closed = address, False
        self._listener = listen(address)
        name = self._listener.getsockname()
        self.address = address_text(name if isinstance(name, str) else name[:2])
        threading.Thread(target=self._accept, name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and remove the socket's file."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if isinstance(self._address, str):
            Path(self._address).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                self._start_serving(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:  # no more file descriptors or threads
                if not self._is_closed:
                    _log.warning("cannot take a connection for blocks: %s", error)
                    time.sleep(_PAUSE_S)

    def _start_serving(self, sock: socket.socket) -> None:
        """Serve a client in a thread, or end its connection. Raises RuntimeError for no thread."""
        if not self._free.acquire(blocking=False):
            sock.close()
            return
        try:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        except RuntimeError:
            sock.close()
            self._free.release()
            raise

    def _serve(self, sock: socket.socket) -> None:
        peer = FrameSocket(sock, _MAX_REQUEST_BYTES)
        try:
            with sock:
                if not self._is_trusted(peer):
                    return
                while True:
                    request = peer.receive(time.monotonic() + _IDLE_S)
                    peer.send(b"".join(self._answer(request)), time.monotonic() + _IDLE_S)
        except (OSError, EOFError, ValueError) as error:
            _log.debug("a connection for blocks ended: %s", error)
        finally:
            self._free.release()

    def _is_trusted(self, peer: FrameSocket) -> bool:
        """Exchange proofs of the key."""
        deadline_s = time.monotonic() + _CONNECT_S
        ours = secrets.token_bytes(_NONCE_BYTES)
        peer.send(ours, deadline_s)
        said = peer.receive(deadline_s)
        theirs, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"client", ours, theirs)):
            _log.warning("a peer with another key asked for blocks, and got none")
            return False
        peer.send(_proof(self._key, b"server", ours, theirs), deadline_s)
        return True

    def _answer(self, request: bytes) -> Iterator[bytes | memoryview[int]]:
        kind = request[:1]
        digests = [request[at : at + DIGEST_BYTES] for at in range(1, len(request), DIGEST_BYTES)]
        if kind == _NAMESPACE:
            yield self._namespace
        elif kind == _ASK:
            missing = (count for count, each in enumerate(digests) if not self._source.has(each))
            yield next(missing, len(digests)).to_bytes(_COUNT_BYTES, "little")
        elif len(digests) == 1 and kind == _CHILDREN:
            for digest, tokens in self._source.children(digests[0])[:_MAX_CHILDREN]:
                yield digest + len(tokens).to_bytes(_COUNT_BYTES, "little") + tokens.tobytes()
        elif len(digests) == 1 and kind == _FETCH:
            block = self._source.get(digests[0])
            if block is not None:
                yield from block_file.block_parts(self._namespace, block, self._key)


class KVPeer:
    """Another engine that blocks are fetched from. Called by one thread, which waits.

    error: why it is not asked now, or empty.
    """

    def __init__(self, address: Address, namespace: bytes, key: bytes) -> None:
        self.error = ""
        self._address, self._namespace, self._key = address, namespace, key
        self._connector = Connector(address)
        self._peer: FrameSocket | None = None
        self._retry_s = 0.0

    @property
    def is_resting(self) -> bool:
        """True for some time after it has failed, in which it is not asked."""
        return time.monotonic() < self._retry_s

    def num_held(self, digests: list[bytes]) -> int:
        """How many leading blocks of a chain the peer has; 0 if it does not answer."""
        asked = digests[:_MAX_DIGESTS]
        return int.from_bytes(self._ask(_ASK, *asked), "little") if asked else 0

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks that the peer has behind a block."""
        reply, at = self._ask(_CHILDREN, parent), 0
        found = []
        while len(reply) >= at + DIGEST_BYTES + _COUNT_BYTES:
            digest, at = reply[at : at + DIGEST_BYTES], at + DIGEST_BYTES
            count = int.from_bytes(reply[at : at + _COUNT_BYTES], "little")
            first = at + _COUNT_BYTES
            at = first + 4 * count
            if count > BLOCK_TOKENS or at > len(reply):
                break  # of another version
            found.append((digest, np.frombuffer(reply, np.int32, count, first)))
        return found

    def fetch(self, digest: bytes) -> KVBlock | None:
        """Return a block, or None if the peer has it no more or does not answer."""
        content = self._ask(_FETCH, digest)
        if not content:
            return None
        try:
            block = block_file.parse_block(content, self._namespace, self._key)
        except BlockRefused as reason:
            self._fail(f"refused a block: {reason}")
            return None
        return block if block.digest == digest else None

    def close(self) -> None:
        """End the connection."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _ask(self, kind: bytes, *digests: bytes) -> bytes:
        """Send a request and return its reply, which is empty if there is none."""
        if self.is_resting:
            return b""
        request = b"".join((kind, *digests))
        try:
            reply = self._reuse(request)
            if reply is None:
                self._peer = self._connect()
                reply = self._exchange(self._peer, request)
        except (OSError, EOFError, ValueError) as error:
            self._fail(_reason(error))
            return b""
        self.error = ""
        return reply

    def _reuse(self, request: bytes) -> bytes | None:
        """Send a request over the open connection; None if there is none, or it has ended."""
        if self._peer is None:
            return None
        try:
            return self._exchange(self._peer, request)
        except (ConnectionError, EOFError):
            self.close()
            return None

    def _exchange(self, peer: FrameSocket, request: bytes) -> bytes:
        deadline_s = time.monotonic() + _REPLY_S
        peer.send(request, deadline_s)
        return peer.receive(deadline_s, _MIN_BYTES_PER_S)

    def _connect(self) -> FrameSocket:
        deadline_s = time.monotonic() + _CONNECT_S
        peer = FrameSocket(self._connector.connect(deadline_s))
        try:
            self._exchange_proofs(peer, deadline_s)
            peer.send(_NAMESPACE, deadline_s)
            namespace = peer.receive(deadline_s)
            if namespace != self._namespace:
                raise OSError(f"it has {namespace_difference(self._namespace, namespace)}")
        except BaseException:
            peer.close()
            raise
        return peer

    def _exchange_proofs(self, peer: FrameSocket, deadline_s: float) -> None:
        """Raises OSError if the peer has another key."""
        theirs, ours = peer.receive(deadline_s), secrets.token_bytes(_NONCE_BYTES)
        peer.send(ours + _proof(self._key, b"client", theirs, ours), deadline_s)
        try:
            proof = peer.receive(deadline_s)
        except EOFError:  # ours has not convinced it
            proof = b""
        if not hmac.compare_digest(proof, _proof(self._key, b"server", theirs, ours)):
            raise OSError("it has another key: both need the same kv/key in their state folders")

    def _fail(self, reason: str) -> None:
        if self.error != reason:
            _log.warning("the peer %s gives no blocks: %s", address_text(self._address), reason)
        self.error, self._retry_s = reason, time.monotonic() + RETRY_S
        self.close()


def _reason(error: Exception) -> str:
    """Why there is no reply, for people."""
    if isinstance(error, EOFError):
        return "it ended the connection"
    return getattr(error, "strerror", None) or str(error) or "timed out"


def _proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key, b"localgen kv " + role + server_nonce + client_nonce, "sha256")
