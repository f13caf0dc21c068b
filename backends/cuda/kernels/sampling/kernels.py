"""The kernels that sampling consists of: no sort, nothing asked of the host.

Two launches. `scan_logits_kernel` reads every logit once: the best of every group of GROUP_TOKENS
tokens, and for rows without truncation the token itself, chunk by chunk. `sample_token_kernel` has
one program a row. What top-k or top-p cuts off is a threshold on the logits, found by bisection
over their bits as integers: first over the groups' best, which bounds it from below and leaves few
groups (at most k hold any of the k best tokens), then over the tokens of these, in registers. Where
too many groups are left (a large k, a flat distribution under top-p alone) they are read again for
every four pivots.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from localgen.backends.cuda.kernels.sampling.gumbel import tl_gumbel_noise

GROUP_TOKENS = 64
# groups whose tokens `sample_token_kernel` holds in registers
MAX_REGISTER_GROUPS = 64
NUM_PIVOTS = 4

_GROUP_TOKENS, _MAX_REGISTER_GROUPS, _NUM_PIVOTS = map(
    tl.constexpr, (GROUP_TOKENS, MAX_REGISTER_GROUPS, NUM_PIVOTS)
)
_REGISTER_TOKENS = tl.constexpr(GROUP_TOKENS * MAX_REGISTER_GROUPS)
# groups' best that are searched at once, and groups listed at once
_SEARCH_BLOCK, _LIST_BLOCK = tl.constexpr(1024), tl.constexpr(1024)
# the search for candidates may end with so many: the best of several groups is not all of them
_ENOUGH_GROUPS = tl.constexpr(MAX_REGISTER_GROUPS * 7 // 8)
# rows of packed copies: where they begin must not decide what is compiled
_UNALIGNED_SETTINGS = ["temperatures", "top_ks", "top_ps", "min_ps", "seed_hashes", "positions"]
_UNALIGNED_EDITS = [
    *("rows", "tokens", "counts", "biases"),
    *("repeat_penalties", "presence_penalties", "frequency_penalties"),
]
_NO_TOKEN = tl.constexpr(2**31 - 1)
_FLOAT32_MIN = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_edits"], do_not_specialize_on_alignment=_UNALIGNED_EDITS)
def apply_penalties_kernel(
    logits,
    stride,
    rows,
    tokens,
    counts,
    biases,
    repeat_penalties,
    presence_penalties,
    frequency_penalties,
    num_edits,
    block: tl.constexpr,
):
    """Penalties and biases, an element for each (row, token) that has any; in place."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_edits
    row = tl.load(rows + at, mask=inside, other=0)
    place = logits + row.to(tl.int64) * stride + tl.load(tokens + at, mask=inside, other=0)
    count = tl.load(counts + at, mask=inside, other=0.0)
    value = tl.load(place, mask=inside, other=0.0)
    by = tl.load(repeat_penalties + row, mask=inside, other=1.0)
    seen = tl.where(value > 0, tl.div_rn(value, by), value * by)
    seen -= count * tl.load(frequency_penalties + row, mask=inside, other=0.0)
    seen -= tl.load(presence_penalties + row, mask=inside, other=0.0)
    value = tl.where(count > 0, seen, value) + tl.load(biases + at, mask=inside, other=0.0)
    tl.store(place, value, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED_SETTINGS)
def scan_logits_kernel(
    logits,
    stride,
    vocab,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seed_hashes,
    positions,
    group_max,
    split_stats,
    split_best_tokens,
    num_splits,
    num_groups,
    chunk_groups: tl.constexpr,
):
    """A chunk of a row.

    group_max: float32 [rows, groups]. split_stats: float32 [rows, 3, splits]: the best score, the
    largest logit, and the sum of exp(logit - largest). split_best_tokens: int32 [rows, splits].
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = split * chunk_groups + tl.arange(0, chunk_groups)
    tokens = group[:, None] * _GROUP_TOKENS + tl.arange(0, _GROUP_TOKENS)[None, :]
    values = _load_logits(logits + row * stride, tokens, tokens < vocab)
    best = tl.max(values, 1)
    tl.store(group_max + row * num_groups + group, best, mask=group < num_groups)
    temperature = tl.load(temperatures + row)
    cuts = _truncation_flags(row, vocab, top_ks, top_ps, min_ps)
    partial = split_stats + row * 3 * num_splits + split
    if (temperature == 0) | (cuts == 0):
        scores = values
        if temperature > 0:
            scores = _gumbel_scores(values, tokens, temperature, row, seed_hashes, positions)
        score, token = _argmax(scores, tokens)
        tl.store(partial, score)
        tl.store(split_best_tokens + row * num_splits + split, token)
    elif cuts % 4 == 2:
        peak = tl.max(best)
        total = tl.sum(tl.exp(values - tl.where(peak < _FLOAT32_MIN, 0.0, peak)))
        tl.store(partial + num_splits, peak)
        tl.store(partial + 2 * num_splits, total)


@triton.jit(
    do_not_specialize=["stride", "vocab", "num_splits", "num_groups"],
    do_not_specialize_on_alignment=_UNALIGNED_SETTINGS,
)
def sample_token_kernel(
    logits,
    stride,
    vocab,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seed_hashes,
    positions,
    group_max,
    split_stats,
    split_best_tokens,
    num_splits,
    num_groups,
    candidate_groups,
    sampled_tokens,
    min_logits,
    splits_block: tl.constexpr,
    groups_block: tl.constexpr,
):
    """The token of a row: int64 sampled_tokens[row]; the lowest logit that is kept: float32
    min_logits[row].

    candidate_groups: int32 [rows, groups], for notes.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    cuts = _truncation_flags(row, vocab, top_ks, top_ps, min_ps)
    split = tl.arange(0, splits_block)
    if (temperature == 0) | (cuts == 0):
        scores = _load_or_neg_inf(split_stats + row * 3 * num_splits, split, num_splits)
        tokens = tl.load(
            split_best_tokens + row * num_splits + split, mask=split < num_splits, other=_NO_TOKEN
        )
        score, token = _argmax(scores, tokens)
        cut = tl.full((), -float("inf"), tl.float32)
    else:
        of_row = group_max + row * num_groups
        # the best of every few groups, as many as fit in registers
        together: tl.constexpr = max(groups_block // _SEARCH_BLOCK, 1)
        begin = tl.arange(0, groups_block // together) * together
        best = _load_or_neg_inf(of_row, begin, num_groups)
        for i in tl.static_range(1, together):
            best = tl.maximum(best, _load_or_neg_inf(of_row, begin + i, num_groups))
        peak = tl.max(best)
        total = tl.full((), 1.0, tl.float32)
        if cuts % 4 == 2:
            peaks = _load_or_neg_inf(split_stats + (row * 3 + 1) * num_splits, split, num_splits)
            sums = tl.load(
                split_stats + (row * 3 + 2) * num_splits + split, mask=split < num_splits, other=0.0
            )
            total = tl.sum(sums * tl.exp(peaks - peak))
        k = tl.load(top_ks + row).to(tl.float32)
        p = tl.load(top_ps + row)
        # -inf without min-p
        floor = peak + tl.log(tl.load(min_ps + row))
        low, high = _threshold_bounds(best, peak, cuts, k, p, total, floor, vocab)
        own = candidate_groups + row * num_groups
        count = _list_candidate_groups(of_row, own, num_groups, _key_to_float(low))
        line = logits + row * stride
        if count <= _MAX_REGISTER_GROUPS:
            tokens, inside = _candidate_tokens(own, 0, count, vocab)
            values = _load_logits(line, tokens, inside)
            if cuts % 2 == 1:
                low = _search_threshold(
                    values, tl.full(values.shape, 1.0, tl.float32), k, low, high, 0
                )
            if cuts % 4 >= 2:
                mass = tl.where(values >= _key_to_float(low), tl.exp(values - peak), 0.0)
                if cuts % 2 == 1:
                    total = tl.sum(mass)
                low = _search_threshold(values, mass, p * total, low, high, 0)
        else:
            if cuts % 2 == 1:
                low = _search_threshold_in_memory(
                    line, own, count, vocab, peak, k, low, high, False
                )
            if cuts % 4 >= 2:
                if cuts % 2 == 1:
                    total = tl.full((), 0.0, tl.float32)
                    for start in range(0, count, _MAX_REGISTER_GROUPS):
                        tokens, inside = _candidate_tokens(own, start, count, vocab)
                        values = _load_logits(line, tokens, inside)
                        total += tl.sum(
                            tl.where(values >= _key_to_float(low), tl.exp(values - peak), 0.0)
                        )
                low = _search_threshold_in_memory(
                    line, own, count, vocab, peak, p * total, low, high, True
                )
        cut = tl.maximum(_key_to_float(low), floor)
        score = tl.full((), -float("inf"), tl.float32)
        token = tl.full((), _NO_TOKEN, tl.int32)
        for start in range(0, count, _MAX_REGISTER_GROUPS):
            tokens, inside = _candidate_tokens(own, start, count, vocab)
            values = _load_logits(line, tokens, inside)
            scores = _gumbel_scores(values, tokens, temperature, row, seed_hashes, positions)
            here, first = _argmax(tl.where(values >= cut, scores, -float("inf")), tokens)
            token = tl.where(here > score, first, token)
            score = tl.maximum(here, score)
        # where everything is banned, the first as of any tie
        token = tl.where(score < _FLOAT32_MIN, 0, token)
    tl.store(sampled_tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(min_logits + row, cut)


@triton.jit
def _load_or_neg_inf(start, at, size):
    return tl.load(start + at, mask=at < size, other=-float("inf"))


@triton.jit
def _load_logits(row_logits, tokens, inside):
    return tl.load(row_logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _truncation_flags(row, vocab, top_ks, top_ps, min_ps):
    """What truncates this row: 1 for top-k, 2 for top-p, 4 for min-p, added up."""
    k = tl.load(top_ks + row)
    cuts = tl.where((k > 0) & (k < vocab), 1, 0)
    cuts += tl.where(tl.load(top_ps + row) < 1, 2, 0)
    return cuts + tl.where(tl.load(min_ps + row) > 0, 4, 0)


@triton.jit
def _gumbel_scores(values, tokens, temperature, row, seed_hashes, positions):
    noise = tl_gumbel_noise(tl.load(seed_hashes + row), tl.load(positions + row), tokens)
    return values / temperature + noise


@triton.jit
def _argmax(scores, tokens):
    """The best score and its token, the lowest of several."""
    score = tl.max(scores)
    return score, tl.min(tl.where(scores == score, tokens, _NO_TOKEN))


@triton.jit
def _float_to_key(x):
    """A float32's bits as an int64 that is ordered as floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _key_to_float(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold_bounds(best, peak, cuts, k, p, total, floor, vocab):
    """Keys that the threshold lies between; the lower one leaves few groups, if it can."""
    lowest, high = _float_to_key(tl.full((), _FLOAT32_MIN, tl.float32)), _float_to_key(peak)
    low = lowest
    if cuts % 2 == 1:
        # k groups have a token as good as this: so have k tokens
        low = _search_threshold(
            best, tl.full(best.shape, 1.0, tl.float32), k, low, high, _ENOUGH_GROUPS
        )
    elif cuts % 4 == 2:
        # all tokens together that are so far below the best one weigh less than 1 - p
        tail = tl.log(1.0 - p) - tl.log(vocab.to(tl.float32)) - 1.0
        low = tl.maximum(lowest, _float_to_key(peak + tail))
        low = _search_threshold(best, tl.exp(best - peak), p * total, low, high, _ENOUGH_GROUPS)
    else:
        low = tl.maximum(lowest, _float_to_key(floor))
    return low, high


@triton.jit
def _narrow_bounds(enough, low, high, step):
    """The bounds after it is known which of the pivots, step apart above low, are met.

    One step more than there are pivots must be beyond high: then nothing up to high is left out.
    """
    met = tl.sum(enough.to(tl.int32))
    low += step * met
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _search_threshold(values, weights, target, low, high, stop_count: tl.constexpr):
    """The greatest key up to high from which on the values weigh at least target; low if none.

    stop_count: stop early where no more values than this are left; 0: never.
    """
    while low < high:
        step = (high - low) // (_NUM_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _NUM_PIVOTS) + 1)
        above = values[None, :] >= _key_to_float(keys)[:, None]
        weighed = tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        enough = (weighed >= target) & (keys <= high)
        low, high = _narrow_bounds(enough, low, high, step)
        if stop_count > 0:
            count = tl.sum(above.to(tl.int32), 1)
            high = tl.where(tl.sum((enough & (count <= stop_count)).to(tl.int32)) > 0, low, high)
    return low


@triton.jit
def _search_threshold_in_memory(
    row_logits, candidate_groups, count, vocab, peak, target, low, high, by_mass: tl.constexpr
):
    """As _search_threshold, over the tokens of all candidate groups, read again for every
    pivots."""
    while low < high:
        step = (high - low) // (_NUM_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _NUM_PIVOTS) + 1)
        weighed = tl.zeros([_NUM_PIVOTS], tl.float32)
        for start in range(0, count, _MAX_REGISTER_GROUPS):
            tokens, inside = _candidate_tokens(candidate_groups, start, count, vocab)
            values = _load_logits(row_logits, tokens, inside)
            weights = tl.exp(values - peak) if by_mass else tl.full(values.shape, 1.0, tl.float32)
            above = values[None, :] >= _key_to_float(keys)[:, None]
            weighed += tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        low, high = _narrow_bounds((weighed >= target) & (keys <= high), low, high, step)
    return low


@triton.jit
def _list_candidate_groups(row_group_max, candidate_groups, num_groups, min_logit):
    """Write down the groups whose best is at least this, in order; how many there are."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_groups, _LIST_BLOCK):
        group = start + tl.arange(0, _LIST_BLOCK)
        listed = (_load_or_neg_inf(row_group_max, group, num_groups) >= min_logit).to(tl.int32)
        tl.store(candidate_groups + count + tl.cumsum(listed, 0) - 1, group, mask=listed > 0)
        count += tl.sum(listed)
    # other threads read what this one has listed
    tl.debug_barrier()
    return count


@triton.jit
def _candidate_tokens(candidate_groups, start, count, vocab):
    """Tokens of the candidate groups from start on, and which of them are there."""
    at = tl.arange(0, _REGISTER_TOKENS)
    place = start + at // _GROUP_TOKENS
    group = tl.load(candidate_groups + place, mask=place < count, other=0)
    tokens = group * _GROUP_TOKENS + at % _GROUP_TOKENS
    return tokens, (place < count) & (tokens < vocab)
