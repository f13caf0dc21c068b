"""Attention kernels in Triton's interpreter equal their reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from localgen.backends.cuda.kernels.attention import decode, prefill
from localgen.backends.cuda.kernels.attention.decode import choose_decode_tile
from localgen.backends.cuda.kernels.attention.online_softmax import AttentionTile
from localgen.backends.cuda.kernels.attention.paged import (
    paged_attention_reference,
    paged_attention_triton,
)
from localgen.backends.cuda.kernels.attention.prefill import choose_prefill_tile
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.kv_cache import LayerKV, quantize_kv

PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """sequences: (rows, length) of each; heads, kv_heads, size: of the model."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    window: int | None = None
    softcap: float | None = None
    cache: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Inputs:
    queries: Tensor
    cache: LayerKV
    ragged: AttentionMetadata


def made(case: Case, seed: int) -> Inputs:
    """Random inputs; cache beyond the sequences and unused table entries are poisoned."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pages_of = [-(-length // PAGE) for _, length in case.sequences]
    total = sum(pages_of) + 3
    order = torch.randperm(total, generator=generator).tolist()
    tables = torch.full((len(case.sequences), max(pages_of) + 2), 2**30, dtype=torch.int32)
    shape = (total, case.kv_heads, PAGE, case.size)
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    for number, ((_, length), count) in enumerate(zip(case.sequences, pages_of, strict=True)):
        for index in range(count):
            page = order.pop()
            tables[number, index] = page
            inside = min(PAGE, length - index * PAGE)
            for part in (keys, values):
                part[page, :, :inside] = normal(case.kv_heads, inside, case.size)
    rows = [count for count, _ in case.sequences]
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in case.sequences], dtype=torch.int32)
    ragged = AttentionMetadata(tables, starts, lengths, max(rows), int(lengths.max()))
    queries = normal(sum(rows), case.heads, case.size).to(case.dtype)
    return Inputs(queries, stored(keys, values, case.cache), ragged)


def stored(keys: Tensor, values: Tensor, dtype: torch.dtype) -> LayerKV:
    if dtype.is_floating_point and dtype.itemsize > 1:
        return LayerKV(keys.to(dtype), values.to(dtype))
    (k, k_by), (v, v_by) = quantize_kv(keys, dtype), quantize_kv(values, dtype)
    return LayerKV(k, v, k_by, v_by)


def exact(inputs: Inputs, case: Case) -> Tensor:
    cache = inputs.cache
    if cache.key_scales is None:
        cache = LayerKV(cache.keys.double(), cache.values.double())
    return paged_attention_reference(
        inputs.queries.double(),
        cache,
        inputs.ragged,
        scale=case.size**-0.5,
        window=case.window,
        softcap=case.softcap,
    )


def compare(case: Case, seed: int = 0, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    inputs = made(case, seed)
    # a result of its own must have been written everywhere
    if monkeypatch is not None:
        monkeypatch.setattr(torch, "empty", poisoned)
    ours = paged_attention_triton(
        inputs.queries,
        inputs.cache,
        inputs.ragged,
        scale=case.size**-0.5,
        window=case.window,
        softcap=case.softcap,
    )
    tolerance = 2e-3 if case.dtype is torch.float16 else 2e-5
    torch.testing.assert_close(ours.double(), exact(inputs, case), atol=tolerance, rtol=tolerance)


def poisoned(*shape: int | tuple[int, ...], **kind: object) -> Tensor:
    made_of = shape[0] if isinstance(shape[0], tuple) else shape
    return torch.full(made_of, torch.nan, **kind)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the kernels' output tensors with NaN."""
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(
        torch, "empty_like", lambda like: torch.full(like.shape, torch.nan, dtype=like.dtype)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 1),)),
        Case(((1, 16), (1, 17), (1, 5))),
        Case(((1, 300),)),
        Case(((1, 70), (1, 130)), heads=8, kv_heads=1),
        Case(((1, 45), (1, 33)), heads=3, kv_heads=3, size=96),
        Case(((1, 50),), size=128),
        Case(((1, 40),), size=256, heads=2, kv_heads=1),
        Case(((1, 40),), size=80),
        Case(((1, 200), (1, 20)), window=33),
        Case(((1, 90),), softcap=5.0),
        Case(((3, 60), (8, 100), (1, 9))),
        Case(((5, 150),), window=20, softcap=3.0, heads=6, kv_heads=2),
        Case(((1, 64), (1, 128), (1, 129), (1, 256))),
        Case(((1, 500), (1, 130)), window=200),
        Case(((8, 500), (2, 333)), window=300, softcap=3.0),
        Case(((8, 40), (1, 70)), heads=32, kv_heads=2, size=16),
    ],
    ids=str,
)
def test_decode_and_draft_rows_equal_the_reference(case: Case, seed: int) -> None:
    compare(case, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(((9, 9),)),
        Case(((70, 70),)),
        Case(((20, 100),)),
        Case(((33, 40), (65, 65), (17, 80))),
        Case(((30, 30),), heads=2, kv_heads=1, size=96),
        Case(((30, 60),), heads=2, kv_heads=2, size=128),
        Case(((20, 40),), heads=2, kv_heads=1, size=256),
        Case(((64, 90),), window=17),
        Case(((40, 40), (12, 50)), window=30, softcap=4.0),
        Case(((130, 140),), heads=2, kv_heads=1),
        Case(((20, 300), (9, 130)), window=200),
        Case(((64, 128), (65, 192)), heads=3, kv_heads=1),
        Case(((20, 70), (30, 30)), heads=14, kv_heads=2),
        Case(((12, 40),), heads=32, kv_heads=2, size=16),
    ],
    ids=str,
)
def test_prefill_rows_equal_the_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 30), (20, 25), (1, 50), (4, 70))),
        Case(((20, 25), (1, 50)), window=16),
        Case(((1, 1), (64, 64), (8, 8), (9, 9), (65, 66))),
    ],
    ids=str,
)
def test_mixed_prefill_and_decode_equal_the_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 60), (1, 37))),
        Case(((3, 200), (1, 37)), size=96, window=150),
        Case(((12, 60), (12, 37))),
        Case(((20, 300),), size=96, heads=3, kv_heads=1, window=200),
    ],
    ids=str,
)
def test_eight_bit_cache_equals_the_reference(kind: torch.dtype, case: Case) -> None:
    compare(replace(case, cache=kind), 3)


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_half_precision_equals_the_reference(rows: int) -> None:
    compare(Case(((rows, 50), (rows, 90)), dtype=torch.float16, cache=torch.float16))


def split(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of splits of both kernels."""

    def chosen(choose: Callable[..., AttentionTile]) -> Callable[..., AttentionTile]:
        return lambda **numbers: replace(choose(**numbers), num_splits=splits)

    monkeypatch.setattr(decode, "choose_decode_tile", chosen(choose_decode_tile))
    monkeypatch.setattr(decode, "_launcher", decode._launcher.__wrapped__)  # not cached
    monkeypatch.setattr(prefill, "choose_prefill_tile", chosen(choose_prefill_tile))


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_any_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more splits than blocks: most of them get no tokens."""
    split(splits, monkeypatch)
    compare(Case(((1, 300), (1, 1), (1, 65)), heads=2, kv_heads=1))


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize(
    "case",
    [
        Case(((8, 400), (1, 20)), heads=2, kv_heads=1, window=250),
        Case(((20, 300), (9, 9)), heads=2, kv_heads=1),
        Case(((30, 400),), heads=2, kv_heads=1, window=200, softcap=3.0),
        Case(((1, 200), (40, 300), (1, 5), (3, 90)), heads=2, kv_heads=1),
        Case(((12, 200), (1, 90)), heads=2, kv_heads=1, size=96, cache=torch.int8),
    ],
    ids=str,
)
def test_splits_of_prompts_and_drafts(
    case: Case, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(splits, monkeypatch)
    compare(case)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split(splits, monkeypatch)
    random = Random(seed)
    rows = [random.choice((1, 1, 3, 8, 9, 33)) for _ in range(3)]
    sequences = tuple((count, count + random.randrange(300)) for count in rows)
    window = random.choice((None, random.randrange(1, 300)))
    compare(Case(sequences, heads=3, kv_heads=random.choice((1, 3)), size=32, window=window), seed)


def decode_splits(num_seqs: int, max_seq_len: int, rows: int = 1) -> int:
    return choose_decode_tile(
        num_seqs=num_seqs,
        max_query_len=rows,
        max_seq_len=max_seq_len,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        quantized=False,
        arch=90,
        num_sms=132,
    ).num_splits


def test_a_long_sequence_among_many_is_split() -> None:
    assert decode_splits(1, 8192) == 64
    assert decode_splits(64, 4096) == 1
    assert decode_splits(64, 100_000) == 32
    # the partial results of the step take 32 MiB
    assert decode_splits(256, 100_000) == 8
    assert decode_splits(128, 100_000, rows=8) == 2
    assert decode_splits(256, 100_000, rows=8) == 1


@pytest.mark.parametrize(
    ("num_seqs", "num_rows", "longest", "max_seq_len", "splits"),
    [
        (1, 50, 50, 32_768, 8),  # a turn behind a long chat
        (1, 12, 12, 32_768, 16),  # drafts
        (1, 50, 50, 1024, 1),  # nothing to divide
        (1, 50, 50, 2100, 2),
        (1, 4096, 4096, 32_768, 1),  # enough tiles
        (64, 113, 50, 32_768, 2),  # next to 63 that decode
        (64, 64 * 12, 12, 32_768, 1),
    ],
)
def test_short_prompts_behind_long_prefixes_are_split(
    num_seqs: int, num_rows: int, longest: int, max_seq_len: int, splits: int
) -> None:
    tile = choose_prefill_tile(
        num_seqs=num_seqs,
        num_rows=num_rows,
        max_query_len=longest,
        max_seq_len=max_seq_len,
        max_decode_rows=8,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        quantized=False,
        arch=90,
        num_sms=132,
    )
    assert tile.num_splits == splits


@pytest.mark.parametrize("splits", [1, 4])
def test_the_prefill_kernel_also_serves_few_rows(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(splits, monkeypatch)
    case = Case(((1, 70), (3, 64), (20, 50), (8, 8)))
    inputs = made(case, 5)
    options: dict[str, Any] = {"scale": case.size**-0.5, "window": None, "softcap": None}
    given = (inputs.queries, inputs.cache, inputs.ragged)
    alone = paged_attention_triton(*given, max_decode_rows=0, **options)
    torch.testing.assert_close(alone.double(), exact(inputs, case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 100])
def test_page_ids_are_read_within_the_sequence(
    window: int | None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of the next block are loaded ahead, but none after the last page of a sequence."""
    split(splits, monkeypatch)
    case = Case(((1, 300), (3, 64), (1, 65), (20, 150), (9, 128)), heads=2, kv_heads=1)
    inputs = made(case, 4)
    pages: list[int] = []
    # in the middle of a larger tensor, so that a read beyond it is known to be one
    guarded = torch.nn.functional.pad(inputs.ragged.page_tables, (0, 0, 9, 9))
    tables = guarded[9:-9]
    ragged = replace(inputs.ragged, page_tables=tables)
    interpreted = interpreter._interpreter

    def load(pointers: Any, mask: Any, *others: Any) -> Any:
        at = (pointers[mask].astype("int64") - guarded.data_ptr()) // guarded.element_size()
        pages.extend(at[(at >= 0) & (at < guarded.numel())].tolist())
        return interpreted.load(pointers, mask, *others)

    watched = SimpleNamespace(load=load, store=interpreted.store)
    monkeypatch.setattr(interpreter, "_interpreter", watched)
    paged_attention_triton(
        inputs.queries, inputs.cache, ragged, scale=0.125, window=window, softcap=None
    )
    used = {
        (9 + sequence) * tables.stride(0) + page
        for sequence, (_, length) in enumerate(case.sequences)
        for page in range(-(-length // PAGE))
    }
    assert pages
    assert set(pages) <= used
    assert window or set(pages) == used


def test_padding_rows_of_a_captured_step_are_not_written() -> None:
    """Padding sequences without rows and tokens; padding rows are not written."""
    case = Case(((1, 40), (1, 7)))
    inputs = made(case, 1)
    ragged = inputs.ragged
    padded = AttentionMetadata(
        torch.cat(
            (ragged.page_tables, torch.zeros(2, ragged.page_tables.shape[1], dtype=torch.int32))
        ),
        torch.cat((ragged.query_starts, ragged.query_starts[-1:].repeat(2))),
        torch.cat((ragged.seq_lens, torch.zeros(2, dtype=torch.int32))),
        max_query_len=1,
        max_seq_len=1024,
    )
    queries = torch.cat((inputs.queries, torch.full((2, 4, 64), torch.nan)))
    ours = paged_attention_triton(
        queries, inputs.cache, padded, scale=0.125, window=None, softcap=None
    )
    torch.testing.assert_close(ours[:2].double(), exact(inputs, case), atol=2e-5, rtol=2e-5)
    assert ours[2:].isnan().all()


def test_bounds_that_are_too_high_change_nothing() -> None:
    case = Case(((2, 40), (12, 30)))
    inputs = made(case, 2)
    loose = replace(inputs, ragged=replace(inputs.ragged, max_query_len=400, max_seq_len=5000))
    ours = paged_attention_triton(
        loose.queries, loose.cache, loose.ragged, scale=0.125, window=None, softcap=None
    )
    torch.testing.assert_close(ours.double(), exact(inputs, case), atol=2e-5, rtol=2e-5)
