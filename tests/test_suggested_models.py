"""Models that are proposed to a new user, and the speed that the session list plots."""

from __future__ import annotations

import pytest

from localgen.client.suggested_models import suggested_models
from localgen.hub import quant_choice
from localgen.hub.quant_choice import AvailableMemory
from localgen.machine import bandwidth
from localgen.machine.bandwidth import Bandwidth
from localgen.tui.chat.answer_stream import RateHistory

GB = 1_000_000_000


def on_machine(
    monkeypatch: pytest.MonkeyPatch, memory: AvailableMemory, ram_per_s: float | None
) -> None:
    monkeypatch.setattr(quant_choice, "available_memory", lambda: memory)
    found = None if ram_per_s is None else Bandwidth(ram_per_s)
    monkeypatch.setattr(bandwidth, "cached_memory_bandwidth", lambda: found)


def test_only_models_that_fit_and_are_fast_enough_are_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_machine(monkeypatch, AvailableMemory(64 * GB), 40e9)
    small, *others = suggested_models(5)
    assert small.name == "smollm2"
    assert len(others) == 4
    sizes = [model.size_bytes for model in others]
    assert sizes == sorted(sizes, reverse=True)
    for model in (small, *others):
        assert model.most_tokens_per_s is not None
        assert model.most_tokens_per_s >= 6
    on_machine(monkeypatch, AvailableMemory(2 * GB), 40e9)
    assert all(model.size_bytes < 2 * GB for model in suggested_models(5))


def test_without_a_measurement_no_speed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, AvailableMemory(64 * GB), None)
    proposed = suggested_models(5)
    assert all(model.most_tokens_per_s is None for model in proposed)
    assert all(model.size_bytes < 25 * GB for model in proposed)


def test_a_mixture_of_experts_is_as_fast_as_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_machine(monkeypatch, AvailableMemory(64 * GB), 40e9)
    (mixture,) = [each for each in suggested_models(30) if each.name == "qwen3-30b-a3b"]
    assert mixture.most_tokens_per_s is not None
    assert mixture.most_tokens_per_s > 3 * 40e9 / mixture.size_bytes


def test_rates_of_the_last_periods() -> None:
    now_s = 0.0
    history = RateHistory(lambda: now_s, period_s=0.5, periods=3)
    for now_s, tokens in ((0.1, 5), (0.4, 5), (0.6, 20), (1.7, 1)):  # noqa: B007 - read by the clock
        history.add(tokens)
    assert history.values() == (20.0, 40.0, 0.0)
    now_s = 2.0
    assert history.values() == (40.0, 0.0, 2.0)
