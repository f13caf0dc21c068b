"""Messages between server and engine are unchanged by encoding, however the bytes are split."""

from __future__ import annotations

import dataclasses
import math
import socket
import threading
import time
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localgen.backends.engine import wire
from localgen.backends.messages import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameSocket,
    encode_frame,
)
from localgen.backends.types import Delta, Failed, Finished, Request, StepEvents, Timings

KINDS: tuple[type, ...] = typing.get_args(wire.WireMessage)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type made of dataclasses, unions, tuples, dicts and scalars."""
    if kind in SCALARS:
        return SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is tuple:
        assert arguments[1:] == (...,), kind
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(*(values(argument) for argument in arguments), max_size=3)
    assert isinstance(kind, type), kind
    assert dataclasses.is_dataclass(kind), kind
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


MESSAGES: st.SearchStrategy[wire.WireMessage] = st.one_of([values(kind) for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=50)
    @given(values(kind))
    def round_trip(message: wire.WireMessage) -> None:
        back = wire.CODEC.decode(wire.CODEC.encode(message))
        assert back == message
        assert type(back) is kind

    round_trip()


@settings(max_examples=50)
@given(st.lists(MESSAGES, max_size=4), st.data())
def test_any_split_of_the_stream_gives_the_same_messages(
    messages: list[wire.WireMessage], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(wire.CODEC.encode(message)) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    back: list[wire.WireMessage] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        back += map(wire.CODEC.decode, decoder.feed(stream[begin:end]))
    assert back == messages


def test_byte_by_byte_a_message_appears_with_its_last_byte() -> None:
    events = StepEvents((Delta("a", "🙂", 1),), (), (Failed("b", "queue_full", "later"),))
    decoder = FrameDecoder()
    content = wire.CODEC.encode(events)
    steps = [list(decoder.feed(bytes([byte]))) for byte in encode_frame(content)]
    assert steps[-1] == [content]
    assert not any(steps[:-1])


def test_floats_that_are_not_finite_travel() -> None:
    timings = Timings(ttft_ms=math.inf, queue_ms=math.nan)
    finished = Finished(
        request_id="a", reason="stop", timings=timings, prompt_tokens=1, completion_tokens=1, ctx=8
    )
    back = wire.CODEC.decode(wire.CODEC.encode(StepEvents(finished=(finished,))))
    assert isinstance(back, StepEvents)
    assert back.finished[0].timings.ttft_ms == math.inf
    assert math.isnan(back.finished[0].timings.queue_ms)


def test_an_oversized_frame_is_refused_before_its_body_arrives() -> None:
    header = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        list(FrameDecoder().feed(header))


def test_the_largest_frame_is_awaited() -> None:
    header = MAX_FRAME_BYTES.to_bytes(4, "little")
    assert list(FrameDecoder().feed(header + b"rest to come")) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",  # never used in msgpack
        msgspec.msgpack.encode("a string"),
        msgspec.msgpack.encode([0]),
        msgspec.msgpack.encode([len(KINDS), {}]),  # no such kind
        msgspec.msgpack.encode([-1, {}]),
        msgspec.msgpack.encode([2, {"request_id": 5}]),  # Cancel with a number
        msgspec.msgpack.encode([2, {}]),
        msgspec.msgpack.encode([1, {"request": {"id": "a", "params": {"top_k": "many"}}}]),
        wire.CODEC.encode(wire.Cancel("a")) + b"\x00",  # more than one value
    ],
)
def test_invalid_contents_raise_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        wire.CODEC.decode(content)


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_no_garbage_raises_anything_but_value_error(content: bytes) -> None:
    try:
        message = wire.CODEC.decode(content)
    except ValueError:
        return
    assert isinstance(message, KINDS)


def test_receive_ends_with_the_stream_and_crosses_buffers() -> None:
    big = wire.Submit(Request(id="big", prompt="é" * 600_000))  # several reads long
    sent: list[wire.WireMessage] = [wire.Cancel("a"), big, wire.Cancel("b")]
    ours, theirs = map(FrameSocket, socket.socketpair())

    def send() -> None:
        for message in sent:
            theirs.send(wire.CODEC.encode(message))
        theirs.close()

    thread = threading.Thread(target=send)
    thread.start()
    assert list(map(wire.CODEC.decode, ours)) == sent
    thread.join()
    ours.close()


def test_a_stream_cut_within_a_frame_gives_nothing_for_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode_frame(b"whole") + encode_frame(b"cut")[:-1])
    with ours:
        assert list(FrameSocket(ours)) == [b"whole"]


def test_a_peer_that_dies_with_a_message_unread_is_the_end_of_the_stream() -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    theirs.send(b"last")
    ours.send(b"unread")
    theirs.close()
    assert list(ours) == [b"last"]
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_deadline_holds_for_sending_and_receiving() -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    with pytest.raises(TimeoutError):
        ours.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        ours.send(bytes(1 << 25), time.monotonic() + 0.05)  # more than the socket buffers
    with pytest.raises(TimeoutError):
        theirs.receive(time.monotonic() - 1.0)
    ours.close()
    theirs.close()
