"""Plain steps come often enough that nobody is misled for long by what they took once."""

from __future__ import annotations

import pytest

from localgen.backends.engine.speculation.reference import BaselineSchedule


def drafting_until_due(reference: BaselineSchedule, gain: float) -> int:
    """Steps with drafts until a plain one is due, where these gain so much."""
    count = 0
    while not reference.is_due(gain):
        reference.drafted(10.0, 10.0 * gain)
        count += 1
    return count


def after(reference: BaselineSchedule, gain: float, times: int) -> list[int]:
    """Steps with drafts between plain ones."""
    found = []
    for _ in range(times):
        found.append(drafting_until_due(reference, gain))
        reference.plain(10.0, 10.0)
    return found


def test_plain_steps_come_soon_at_first_and_then_less_often() -> None:
    assert after(BaselineSchedule(), 1.5, 8) == [1, 2, 4, 8, 16, 32, 34, 34]


def test_the_more_is_gained_the_less_often() -> None:
    reference = BaselineSchedule()
    after(reference, 1.9, 8)
    assert drafting_until_due(reference, 1.9) == 48
    reference.plain(10.0, 10.0)
    assert drafting_until_due(reference, 1.2) == 17
    reference.plain(10.0, 10.0)
    assert drafting_until_due(reference, 0.9) == 16


def test_not_soon_where_no_slow_step_explains_what_is_gained() -> None:
    assert after(BaselineSchedule(), 4.0, 3) == [64, 64, 64]


@pytest.mark.parametrize("at_once", [True, False])
def test_who_was_plain_for_long_begins_anew(at_once: bool) -> None:
    reference = BaselineSchedule()
    after(reference, 1.5, 6)
    for _ in range(1 if at_once else 8):
        reference.plain(10.0, 10.0, steps=8 if at_once else 1)
    assert drafting_until_due(reference, 1.5) == 1


def test_a_few_plain_steps_between_change_nothing() -> None:
    reference = BaselineSchedule()
    after(reference, 1.5, 4)
    for _ in range(3):
        reference.plain(10.0, 10.0)
    reference.drafted(10.0, 15.0)
    reference.plain(10.0, 10.0)
    assert drafting_until_due(reference, 1.5) == 16


def test_a_plain_step_that_was_faster_than_believed_is_followed_by_others() -> None:
    reference = BaselineSchedule()
    drafting_until_due(reference, 1.5)
    reference.plain(8.0, 10.0)
    assert reference.is_due(1.5)
    reference.plain(8.0, 10.0)
    assert reference.is_due(1.5)
    reference.plain(8.0, 8.0)
    assert not reference.is_due(1.5)
