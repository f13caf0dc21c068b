"""The line of `localgen top` that says what is wrong."""

from __future__ import annotations

from dataclasses import replace

from top_script import DISK_TIER, MACHINE, ended, model, snapshot

from localgen.tui.top.problems import problems


def test_nothing_is_wrong() -> None:
    ends = tuple(ended(n, why) for n, why in enumerate(("stop", "cancelled", "gone", "tool_calls")))
    assert problems(snapshot(model(), finished_requests=ends)) == ()


def test_failed_requests_of_the_last_minute_are_counted_by_cause() -> None:
    outcomes = ("stop", "queue_full", "queue_full", "engine_died")
    ends = [ended(n, why, ended_ago_s=59.0) for n, why in enumerate(outcomes)]
    ends.append(ended(9, "out_of_memory", ended_ago_s=61.0))
    (said,) = problems(snapshot(model(), finished_requests=tuple(ends)))
    assert said == "3 of 4 requests of the last minute failed: queue full 2, engine died 1"


def test_the_most_urgent_comes_first() -> None:
    broken = model(
        silent_s=12.0,
        threads=1,
        threads_max=2,
        running=1,
        kv_tiers=(replace(DISK_TIER, error="No space left on device"),),
    )
    machine = replace(MACHINE, ram_free_bytes=1_000_000_000)
    found = snapshot(broken, finished_requests=(ended(1, "queue_full"),), machine=machine)
    words = [text.split()[0:3] for text in problems(found)]
    assert words == [
        ["no", "answer", "of"],
        ["1", "of", "1"],
        ["main", "memory", "is"],
        ["prefixes", "of", "llama-8b"],
        ["other", "programs", "use"],
    ]
    assert "(disk: No space left on device)" in problems(found)[3]
    assert problems(found)[4].endswith("llama-8b computes with 1 of 2 threads")


def test_an_idle_model_with_fewer_threads_is_no_problem() -> None:
    assert problems(snapshot(model(threads=1, threads_max=2, running=0))) == ()


def test_names_and_reasons_cannot_draw() -> None:
    broken = model("evil\x1b[2J", kv_tiers=(replace(DISK_TIER, error="a\nb\x1b[1m"),))
    ends = (ended(1, "x\x1b[31m\ny"),)
    for text in problems(snapshot(broken, finished_requests=ends)):
        assert text.isprintable()
