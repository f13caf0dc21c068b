"""Answers in which no text is searched for are read when events are published."""

from __future__ import annotations

import pytest

from benchmarks.answers import NumberTokenizer
from localgen.backends.engine.answers import Answers
from localgen.backends.engine.outbox import PUBLISH_INTERVAL_S, Outbox
from localgen.backends.engine.scheduler import SequenceOutput
from localgen.backends.engine.stats import StatsRecorder
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Delta, StepEvents

END = 0
SNOWMAN = "☃".encode()


class ByteTokenizer(NumberTokenizer):
    """Each token is a byte."""

    def piece(self, token: int) -> bytes:
        return bytes([token])


class Bench:
    """Requests whose tokens are given, and what is published of them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.events: list[StepEvents] = []
        self.outbox = Outbox(self.events.append, clock=lambda: self.now_s)
        self.answers = Answers(ByteTokenizer(256), self.outbox, StatsRecorder(), lambda: "")
        self.stopped: list[Sequence] = []

    def start(self, name: str, params: SamplingParams | None = None) -> Sequence:
        seq = Sequence(
            id=name,
            tokens=[1, 2],
            num_prompt=2,
            params=params or SamplingParams(),
            ctx=99,
            max_len=99,
            stop_ids=frozenset({END}),
        )
        self.answers.start(seq)
        return seq

    def step(
        self, tokens: dict[Sequence, bytes], *, may_wait: bool = True, reason: str | None = None
    ) -> list[StepEvents]:
        """Sample these tokens, the clock going on; return what was published."""
        outputs = []
        for seq, new in tokens.items():
            seq.tokens += new
            outputs.append(SequenceOutput(seq, tuple(new), reason=reason))
        before = len(self.events)
        self.now_s += PUBLISH_INTERVAL_S / 9.5
        self.stopped += self.answers.process(outputs)
        self.outbox.publish(None, deltas_may_wait=may_wait)
        return self.events[before:]


def answered(request_id: str, text: str, num_tokens: int) -> Delta:
    return Delta(request_id, text, num_tokens, prompt_tokens=2)


def test_tokens_of_several_steps_are_one_delta_each() -> None:
    bench = Bench()
    one, other = bench.start("one"), bench.start("other")
    assert bench.step({one: b"a", other: b"b"}) == [
        StepEvents((answered("one", "a", 1), answered("other", "b", 1)))
    ]
    steps = [bench.step({one: b"x", other: b"yz"}) for _ in range(9)]
    assert [len(events) for events in steps] == [0] * 8 + [1]
    assert steps[-1] == [
        StepEvents((answered("one", "x" * 9, 10), answered("other", "yz" * 9, 19))),
    ]
    assert bench.step({one: b"!"}, may_wait=False) == [StepEvents((answered("one", "!", 11),))]
    assert not bench.step({}, may_wait=False), "nothing is read twice"


def test_a_part_of_a_character_publishes_nothing() -> None:
    bench = Bench()
    seq = bench.start("a")
    assert not bench.step({seq: SNOWMAN[:1]}, may_wait=False)
    assert not bench.step({seq: SNOWMAN[1:2]}, may_wait=False)
    assert bench.step({seq: SNOWMAN[2:]}, may_wait=False) == [StepEvents((answered("a", "☃", 3),))]


@pytest.mark.parametrize(("last", "reason"), [(bytes([END]), "stop"), (b"c", "length")])
def test_an_end_brings_the_text_before_it(last: bytes, reason: str) -> None:
    bench = Bench()
    seq = bench.start("a")
    bench.step({seq: b"a"})
    assert not bench.step({seq: b"b"})
    (events,) = bench.step({seq: last}, reason=reason)
    assert events.deltas == (answered("a", "b" if reason == "stop" else "bc", 3),)
    assert [(end.reason, end.completion_tokens) for end in events.finished] == [(reason, 3)]
    assert seq not in bench.answers


def test_cancels_and_failures_bring_the_text_so_far() -> None:
    bench = Bench()
    cancelled, failed = bench.start("cancelled"), bench.start("failed")
    bench.step({cancelled: b"a", failed: b"a"})
    assert not bench.step({cancelled: b"b", failed: b"c"})
    bench.answers.cancel(cancelled)
    bench.answers.fail(failed, "code", "message")
    (events,) = bench.step({})
    assert {(each.request_id, each.text) for each in events.deltas} == {
        ("cancelled", "b"),
        ("failed", "c"),
    }
    assert [end.completion_tokens for end in events.finished] == [2]
    assert [end.request_id for end in events.failed] == ["failed"]
    assert not bench.step({cancelled: b"d"}, may_wait=False), "it has ended"


def test_stop_strings_are_found_in_the_step_that_completes_them() -> None:
    bench = Bench()
    seq = bench.start("a", SamplingParams(stop=("no",)))
    bench.step({seq: b"a"})
    assert not bench.step({seq: b"bn"})
    (events,) = bench.step({seq: b"o"})
    assert bench.stopped == [seq]
    assert [delta.text for delta in events.deltas] == ["b"]
    assert [(end.reason, end.stop) for end in events.finished] == [("stop", "no")]
