"""The rate of a download at given times."""

from __future__ import annotations

from localgen.cli.download_progress import TransferRate


def test_stall_is_shown_after_two_seconds() -> None:
    rate = TransferRate(100_000_000, 0, now_s=0.0)
    assert rate.text(1.0) == "no data yet"
    rate.update(10_000_000, 1.0)
    assert rate.text(1.0) == "10.0 MB/s, 9 s left"
    assert rate.text(2.9).endswith(" left")
    rate.update(10_000_000, 2.9)  # the same number is no progress
    assert rate.text(3.0) == "stalled, 0 B/s"
    rate.update(10_100_000, 4.0)
    assert "stalled" not in rate.text(4.0)


def test_only_the_last_seconds_count() -> None:
    rate = TransferRate(1_000_000_000, 0, now_s=0.0)
    for second in range(1, 61):
        rate.update(second * 1_000_000, float(second))
    for second in range(61, 81):
        rate.update(60_000_000 + (second - 60) * 5_000_000, float(second))
    assert rate.text(80.0).startswith("5.0 MB/s")


def test_a_download_that_starts_over_and_one_that_ends() -> None:
    rate = TransferRate(8_000_000, 6_000_000, now_s=0.0)
    rate.update(0, 1.0)
    rate.update(4_000_000, 2.0)
    assert rate.text(2.0) == "4.0 MB/s, 1 s left"
    rate.update(8_000_000, 3.0)
    assert rate.text(3.0) == "4.0 MB/s"
    assert "stalled" not in rate.text(9.0)


def test_the_time_before_the_first_block_does_not_count() -> None:
    rate = TransferRate(100_000_000, 40_000_000, now_s=0.0)
    assert rate.text(5.0) == "no data yet", "what is there is hashed first: that is no stall"
    rate.update(40_000_000, 5.0)
    rate.update(40_100_000, 6.0)
    assert rate.text(6.0) == "100 KB/s, 9 min 59 s left"
