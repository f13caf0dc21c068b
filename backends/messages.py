"""Messages between a process and its child, over a stream socket that the child inherits.

A frame is a 4-byte little-endian length followed by its content, one message: msgpack of known
types for engines and quantizations. It is a pickle only where the reader trusts the writer: among
the ranks of tensor parallelism, on the way to the process that compiles kernels, and on the way to
a sandbox, which answers in JSON.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

MAX_FRAME_BYTES = 256 << 20
_HEADER_BYTES = 4
_READ_BYTES = 1 << 18
_Message = TypeVar("_Message")


class MessageCodec(Generic[_Message]):
    """Encodes dataclasses of known types as msgpack of [index of the type, body]."""

    def __init__(self, types: tuple[type[_Message], ...]) -> None:
        # not at the top: sandboxes and ranks do without it
        import msgspec

        from localgen.backends.typed_data import prepare_type

        self._tags = {kind: tag for tag, kind in enumerate(types)}
        # the hooks are for Path, which travels as its text
        self._encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)
        self._tag_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
        for kind in types:
            prepare_type(kind)
        self._decoders = [
            msgspec.msgpack.Decoder(kind, dec_hook=lambda path, text: path(text)) for kind in types
        ]

    def encode(self, message: _Message) -> bytes:
        return self._encoder.encode((self._tags[type(message)], message))

    def decode(self, content: bytes) -> _Message:
        """Raises ValueError if it is no message of these types."""
        tag, body = self._tag_decoder.decode(content)
        if not 0 <= tag < len(self._decoders):
            raise ValueError(f"unknown message kind {tag}")
        return self._decoders[tag].decode(body)


def encode_frame(content: bytes) -> bytes:
    return len(content).to_bytes(_HEADER_BYTES, "little") + content


class FrameDecoder:
    """Incremental decoder; buffers incomplete frames. max_bytes: limit of a frame's content."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """Bytes of frames that are incomplete or were not taken."""
        return len(self._buffer)

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the contents completed by these bytes; those not taken stay for the next call.

        Raises ValueError if a frame is too large.
        """
        self._buffer += received
        while len(self._buffer) >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
            if size > self._max_bytes:
                raise ValueError(f"frame of {size} bytes, limit {self._max_bytes}")
            end = _HEADER_BYTES + size
            if len(self._buffer) < end:
                return
            content = bytes(memoryview(self._buffer)[_HEADER_BYTES:end])
            del self._buffer[:end]
            yield content


class FrameSocket:
    """Frames over a blocking socket. Without deadlines, one thread may send while another receives.

    max_bytes: limit of a received frame. deadline_s: of time.monotonic(), when a call as a whole
    raises TimeoutError.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.sock = sock
        self._decoder = FrameDecoder(max_bytes)
        self.fileno, self.close = sock.fileno, sock.close

    def send(self, content: bytes, deadline_s: float | None = None) -> None:
        """Raises OSError if the peer is gone."""
        self._set_timeout(deadline_s)
        self.sock.sendall(encode_frame(content))

    def receive(self, deadline_s: float | None = None, min_bytes_per_s: float = math.inf) -> bytes:
        """Wait for a frame. Raises EOFError if the peer is gone, ValueError if it is too large.

        min_bytes_per_s: the deadline is later by what the received bytes take at this rate.
        """
        contents = self._decoder.feed(b"")
        while (content := next(contents, None)) is None:
            grace_s = self._decoder.num_buffered / min_bytes_per_s
            contents = self.read(None if deadline_s is None else deadline_s + grace_s)
        return content

    def read(self, deadline_s: float | None = None) -> Iterator[bytes]:
        """Wait for bytes; return the contents that they complete, if any. Raises as `receive`."""
        self._set_timeout(deadline_s)
        try:
            received = self.sock.recv(_READ_BYTES)
        except ConnectionResetError:  # the peer died before it read what was sent
            received = b""
        if not received:
            raise EOFError
        return self._decoder.feed(received)

    def __iter__(self) -> Iterator[bytes]:
        """Contents until the peer is gone."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.receive()

    def _set_timeout(self, deadline_s: float | None) -> None:
        remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise TimeoutError
        self.sock.settimeout(remaining_s)


def inherited_socket(fd: int, max_bytes: int = MAX_FRAME_BYTES) -> FrameSocket:
    """Return the child's end of the socket, which its own children do not inherit.

    max_bytes: as in FrameSocket.
    """
    os.set_inheritable(fd, False)
    return FrameSocket(socket.socket(fileno=fd), max_bytes)


def start_process(
    command: list[str], *, max_bytes: int = MAX_FRAME_BYTES, **options: Any
) -> tuple[subprocess.Popen[bytes], FrameSocket]:
    """Start a process whose last argument is the descriptor of its socket; return it and ours.

    max_bytes: as in FrameSocket. options: of Popen. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            fd = theirs.fileno()
            process = subprocess.Popen([*command, str(fd)], pass_fds=[fd], **options)
        except OSError:
            ours.close()
            raise
    return process, FrameSocket(ours, max_bytes)
