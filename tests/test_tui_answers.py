"""Requests of sessions without a screen: answers, stopping, faults, regeneration."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import MakeTui, Tui, play, wait, wait_for_answer

from localgen.backends.errors import EngineDied, InvalidRequest, LoadFailed, ServerUnavailable
from localgen.backends.sampling_params import SamplingParams
from localgen.chat.conversation import Turn
from localgen.chat.parameters import ModelOptions
from localgen.client import TextDelta
from localgen.tui.chat.active_session import CTX_SETTING


def test_answer_becomes_a_stored_turn(make_tui: MakeTui, tmp_path: Path) -> None:
    tui = make_tui((TextDelta("", 1, "hm"), "4", "2", answer()))
    opened = tui.manager.open_empty()
    opened.ask("6 * 7?")
    turn = wait_for_answer(tui, opened)
    assert (turn.prompt, turn.answer, turn.reasoning, turn.stopped) == ("6 * 7?", "42", "hm", False)
    assert turn.summary.startswith("tiny · 41.2 tok/s · first token 56 ms")
    assert opened.name == "6 * 7?"
    other = make_tui()
    assert other.manager.get(opened.id).chat.conversation == opened.chat.conversation


def test_sessions_answer_concurrently(make_tui: MakeTui) -> None:
    gates = [threading.Event(), threading.Event()]
    tui = make_tui(("a", gates[0], answer()), ("b", gates[1], answer()))
    first = tui.manager.open_empty()
    first.ask("one")
    wait(lambda: first.answer_stream and first.answer_stream.num_tokens)
    second = tui.manager.open_empty()
    assert second is not first
    second.ask("two")
    wait(lambda: second.answer_stream and second.answer_stream.num_tokens)
    assert len(tui.manager.answering_sessions) == 2
    gates[1].set()
    assert wait_for_answer(tui, second).answer == "b"
    assert first.is_answering
    gates[0].set()
    assert wait_for_answer(tui, first).answer == "a"


def test_stop_keeps_the_partial_answer(make_tui: MakeTui) -> None:
    tui = make_tui(("half", threading.Event()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait(lambda: opened.answer_stream and opened.answer_stream.num_tokens)
    with pytest.raises(InvalidRequest, match=r"Ctrl\+C stops it"):
        opened.ask("another")
    assert opened.stop()
    turn = wait_for_answer(tui, opened)
    assert turn == Turn("q", "half", True, "", "stopped")
    assert not opened.stop()
    opened.ask("next")
    assert wait_for_answer(tui, opened).answer == "re: next"


def test_lost_server_keeps_the_partial_answer(make_tui: MakeTui) -> None:
    tui = make_tui(("ha", "lf", ServerUnavailable("the server went away")), ("whole", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    turn = wait_for_answer(tui, opened)
    assert turn == Turn("q", "half", True, "", "interrupted: the server went away")
    opened.regenerate()
    assert wait_for_answer(tui, opened).answer == "whole"
    assert len(opened.chat.conversation.turns) == 1


@pytest.mark.parametrize("gone", [ServerUnavailable("left"), EngineDied("died")])
def test_lost_server_is_restarted(make_tui: MakeTui, gone: Exception) -> None:
    tui = make_tui((gone,), ("whole", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    assert wait_for_answer(tui, opened).answer == "whole"


def test_second_failure_is_reported(make_tui: MakeTui) -> None:
    tui = make_tui((ServerUnavailable("left"),), (ServerUnavailable("left again"),))
    opened = tui.manager.open_empty()
    opened.ask("q")
    turn = wait_for_answer(tui, opened)
    assert turn.is_unanswered
    assert turn.summary == "interrupted: left again"
    opened.ask("next")
    wait_for_answer(tui, opened)
    # a prompt that was never answered is not sent again
    assert [m.content for m in tui.clients[0].record.asked[-1].messages] == ["next"]


def test_failed_load_is_reported(make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()

    def fail(*_: object, **__: object) -> None:
        raise LoadFailed("x.gguf is no model")

    monkeypatch.setattr(opened.chat.client, "load", fail)
    opened.ask("q")
    assert wait_for_answer(tui, opened).summary == "interrupted: x.gguf is no model"


def test_internal_error_is_one_sentence(make_tui: MakeTui) -> None:
    tui = make_tui((ZeroDivisionError("oh"),))
    opened = tui.manager.open_empty()
    opened.ask("q")
    assert "internal error (ZeroDivisionError: oh)" in wait_for_answer(tui, opened).summary


def test_failed_regeneration_keeps_the_old_answer(make_tui: MakeTui) -> None:
    gone = ServerUnavailable("gone")
    tui = make_tui(("good", answer()), (gone,), (gone,))
    opened = tui.manager.open_empty()
    opened.ask("q")
    before = wait_for_answer(tui, opened)
    opened.regenerate()
    assert wait_for_answer(tui, opened) == before
    assert tui.store.read(opened.id).conversation.turns == (before,)
    assert opened.last_stream is not None
    assert opened.last_stream.error == "gone"


def test_regeneration_keeps_the_old_answer_until_it_is_complete(make_tui: MakeTui) -> None:
    tui = make_tui(("good", answer()), ("ha", ServerUnavailable("gone")), ("whole", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    good = wait_for_answer(tui, opened)
    opened.regenerate()
    # the request did not contain the old answer
    wait(lambda: opened.last_stream and opened.last_stream.ended.is_set())
    assert [m.content for m in tui.clients[0].record.asked[-1].messages] == ["q"]
    half = wait_for_answer(tui, opened)
    assert half.answer == "ha"
    assert tui.store.read(opened.id).conversation.turns == (good, half)
    opened.regenerate()
    wait_for_answer(tui, opened)
    kept = tui.store.read(opened.id).conversation
    assert kept == opened.chat.conversation
    assert [turn.answer for turn in kept.turns] == ["good", "whole"]


def test_complete_regeneration_replaces_the_answer(make_tui: MakeTui) -> None:
    tui = make_tui(("old", answer()), ("new", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait_for_answer(tui, opened)
    opened.regenerate()
    assert wait_for_answer(tui, opened).answer == "new"
    kept = tui.store.read(opened.id).conversation
    assert [turn.answer for turn in kept.turns] == ["new"]
    assert kept == opened.chat.conversation


def test_settings_made_during_a_load_are_kept(make_tui: MakeTui) -> None:
    tui = make_tui()
    gate = tui.gate_loads()
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait(lambda: opened.answer_stream and opened.answer_stream.load_progress is not None)
    opened.apply_setting("temperature", "0.5")
    opened.apply_setting(CTX_SETTING, "512")
    gate.set()
    wait_for_answer(tui, opened)
    assert opened.chat.options == ModelOptions(params=SamplingParams(temperature=0.5), ctx=512)
    kept = tui.store.read(opened.id)
    assert (kept.params, kept.ctx) == (SamplingParams(temperature=0.5), 512)


def test_regeneration_needs_a_prompt(make_tui: MakeTui) -> None:
    with pytest.raises(InvalidRequest, match="there is no answer to regenerate"):
        make_tui().manager.open_empty().regenerate()


def test_a_growing_answer_is_read_in_pieces(make_tui: MakeTui) -> None:
    gate = threading.Event()
    tui = make_tui(("a", TextDelta("b", 2, "t"), gate, "c", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    answering = opened.answer_stream
    assert answering is not None
    from localgen.tui.chat.answer_stream import StreamPosition

    wait(lambda: answering.num_tokens == 2)
    thought, text, place = answering.chunks_since(StreamPosition())
    assert (thought, text) == ("t", "ab")
    assert answering.status_line() == "TTFT 0 ms · 2 tokens · context ~2/2,048"
    gate.set()
    assert answering.ended.wait(10)
    assert answering.chunks_since(place)[:2] == ("", "c")
    assert answering.speed_text() == "TTFT 56 ms · 41.2 tok/s"


@pytest.mark.parametrize("read", ["status_line", "progress_text", "speed_text"])
def test_loading_may_end_between_two_reads(make_tui: MakeTui, read: str) -> None:
    from localgen.tui.chat.answer_stream import AnswerStream

    reads = [0.25]

    class Loaded(AnswerStream):
        """A client whose model is loaded right after the first read of the progress."""

        @property
        def load_progress(self) -> float | None:
            return reads.pop() if reads else None

        @load_progress.setter
        def load_progress(self, fraction: float | None) -> None:
            pass

    answering = Loaded(make_tui().manager.open_empty().chat, "q")
    assert "25%" in getattr(answering, read)()
    assert "25%" not in getattr(answering, read)()


class Marker:
    """What a weak reference can refer to."""


def test_a_full_collection_during_an_answer_scans_only_what_is_new(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.is_answering)
        gc.collect()
        assert len(gc.get_objects(generation=2)) < gc.get_freeze_count() / 10
        cycle: list[object] = []
        cycle.append(cycle)
        gone = weakref.ref(marker := Marker())
        cycle.append(marker)
        gc.collect()
        del cycle, marker
        gc.collect()
        assert gone() is not None, "it is not scanned again"
        gate.set()
        await tui.wait_until_idle(pilot)
        await tui.until(lambda: gone() is None)

    play(Tui(tmp_path, ("a", gate, answer())), scene)
    assert not gc.get_freeze_count()
