"""What a step takes by its tokens: from the latest ones, and not believed for ever."""

from __future__ import annotations

import pytest

from localgen.backends.engine.speculation.costs import StepCosts


def test_costs_lie_between_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.ms(1) is None
    costs.observe_prompt(100, 700.0)
    costs.observe(1, 20.0)
    assert costs.ms(11) == pytest.approx(88.0), "as a prompt's tokens, until it was tried"
    costs.observe(11, 200.0)
    assert costs.ms(6) == pytest.approx(110.0)
    assert costs.ms(21) == pytest.approx(268.0)
    assert costs.curve() == [(1.0, 20.0), (11.0, 200.0)]


def test_a_prompt_that_was_read_before_says_nothing_of_many_tokens() -> None:
    costs = StepCosts()
    costs.observe(1, 20.0)
    costs.observe(4, 50.0)
    for _ in range(5):
        costs.observe_prompt(1, 20.0)
    assert costs.largest == 4
    assert costs.ms(11) == pytest.approx(120.0), "as its own tokens"
    costs.observe_prompt(40, 180.0)
    assert costs.largest == 40
    assert costs.ms(11) == pytest.approx(78.0)


def test_costs_follow_a_machine_that_gets_slower() -> None:
    costs = StepCosts()
    for ms in [10.0] * 50 + [20.0] * 50:
        costs.observe(1, ms)
    assert costs.ms(1) == pytest.approx(20.0, rel=0.01)


def test_a_size_that_is_not_tried_for_long_is_unknown_again() -> None:
    costs = StepCosts()
    costs.observe(1, 10.0)
    costs.observe(8, 1000.0)
    for _ in range(600):
        costs.pass_by(keep_smallest=True)
    assert [tokens for tokens, _ in costs.curve()] == [1.0]
    for _ in range(8):  # it is looked over now and then
        costs.pass_by(keep_smallest=False)
    assert costs.curve() == []


def test_ages_are_steps_however_rarely_somebody_looks() -> None:
    costs = StepCosts()
    costs.observe(1, 10.0)
    costs.observe(8, 1000.0)
    for _ in range(7):
        costs.pass_by(64, keep_smallest=True)
    assert [tokens for tokens, _ in costs.curve()] == [1, 8]
    costs.pass_by(64, keep_smallest=True)
    assert [tokens for tokens, _ in costs.curve()] == [1]


def test_what_is_in_doubt_can_be_tried_twice_however_rarely_somebody_looks() -> None:
    costs = StepCosts()
    for size, ms in [(1, 10.0)] * 3 + [(8, 90.0)]:
        costs.observe(size, ms)
    known = []
    for _ in range(4):
        costs.pass_by(64, keep_smallest=True, to_risk_ms=500.0)
        known.append([tokens for tokens, _ in costs.curve()])
    assert known == [[1], [1], [1, 8], [1]]


def test_what_rests_on_one_step_is_tried_again_before_long() -> None:
    costs = StepCosts()
    for size, ms in [(1, 10.0)] * 3 + [(4, 14.0)] * 3 + [(8, 90.0), (16, 100.0)]:
        costs.observe(size, ms)

    def pass_by(steps: int, to_lose_ms: float) -> list[int]:
        for _ in range(steps):
            costs.pass_by(keep_smallest=True, to_risk_ms=to_lose_ms)
        return [tokens for tokens, _ in costs.curve()]

    assert pass_by(48, 79.0) == [1, 4, 8, 16], "there is no time for any"
    assert pass_by(8, 85.0) == [1, 4, 16], "three steps say enough, and the largest is too dear"
    costs.observe(8, 20.0)
    assert costs.ms(8) == 20.0, "the faster of two"
    assert pass_by(8, 500.0) == [1, 4, 8], "one after the other"
    assert pass_by(24, 500.0) == [1, 4, 8, 16], "nobody wanted to try it"
    assert pass_by(8, 500.0) == [1, 4, 16]
    costs.observe(8, 22.0)
    assert pass_by(96, 5.0) == [1, 4, 8, 16]
    assert costs.ms(8) == 22.0, "the middle one of three"


def test_one_step_that_something_else_delayed_says_nothing() -> None:
    costs = StepCosts()
    for ms in [2000.0, 10.0, 10.0, 900.0, 10.0]:
        costs.observe(1, ms)
    assert costs.ms(1) == pytest.approx(10.0)
