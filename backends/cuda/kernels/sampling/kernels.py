"""Sampling kernels, without a sort and without host synchronization.

Two launches. `scan_logits_kernel` reads every logit once and stores the maximum of each group of
GROUP_TOKENS tokens and, for rows without truncation, the sampled token of each chunk.
`sample_token_kernel` runs one program per row. Top-k and top-p become a threshold on the logits,
found by a multi-pivot search over their bits as integers. The first search is over the group
maxima. It gives a lower bound and leaves few candidate groups, since at most k groups hold any of
the k best tokens. The second is over the tokens of these groups, in registers, until the bounds
differ in their lower 16 bits only. Few values are left between them, one if the logits were
bfloat16, so the bounds move to these. If too many groups remain (a large k, or a flat distribution
under top-p alone), their logits are read again for every NUM_PIVOTS pivots.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from localgen.backends.cuda.kernels.sampling.gumbel import tl_gumbel_noise

GROUP_TOKENS = 64
# candidate groups whose tokens `sample_token_kernel` can hold in registers
MAX_REGISTER_GROUPS = 64
NUM_PIVOTS = 8

_GROUP_TOKENS, _MAX_REGISTER_GROUPS, _NUM_PIVOTS = map(
    tl.constexpr, (GROUP_TOKENS, MAX_REGISTER_GROUPS, NUM_PIVOTS)
)
_REGISTER_TOKENS = tl.constexpr(GROUP_TOKENS * MAX_REGISTER_GROUPS)
# group maxima searched at once; groups listed per iteration
_SEARCH_BLOCK, _LIST_BLOCK = tl.constexpr(1024), tl.constexpr(1024)
# the candidate search may stop at this many: below the limit because it searches maxima that may
# each stand for several groups
_ENOUGH_GROUPS = tl.constexpr(MAX_REGISTER_GROUPS * 7 // 8)
# views of packed buffers: their alignment varies and must not trigger a recompilation
_UNALIGNED_SETTINGS = ["temperatures", "top_ks", "top_ps", "min_ps", "seed_hashes", "positions"]
_UNALIGNED_EDITS = [
    *("rows", "tokens", "counts", "biases"),
    *("repeat_penalties", "presence_penalties", "frequency_penalties"),
]
NO_TOKEN = tl.constexpr(2**31 - 1)
FLOAT32_MIN = tl.constexpr(-3.4028234663852886e38)


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
    """Apply penalties and biases in place, one element per edited (row, token)."""
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
    """Scan one chunk (split) of a row.

    Outputs: group_max, float32 [rows, groups]; split_stats, float32 [rows, 3, splits]: best score,
    largest logit, and sum of exp(logit - largest); split_best_tokens, int32 [rows, splits]. Score
    and token are written for greedy and untruncated rows, logit and sum for top-p without top-k.
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
        score, token = tl_argmax(scores, tokens)
        tl.store(partial, score)
        tl.store(split_best_tokens + row * num_splits + split, token)
    elif cuts % 4 == 2:
        peak = tl.max(best)
        total = tl.sum(tl.exp(values - tl.where(peak < FLOAT32_MIN, 0.0, peak)))
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
    """Sample the token of a row.

    Outputs: sampled_tokens, int64 [rows]; min_logits, float32 [rows], the lowest logit that is
    kept. candidate_groups: int32 [rows, groups], scratch space.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    cuts = _truncation_flags(row, vocab, top_ks, top_ps, min_ps)
    split = tl.arange(0, splits_block)
    if (temperature == 0) | (cuts == 0):
        scores = load_or_neg_inf(split_stats + row * 3 * num_splits, split, num_splits)
        tokens = tl.load(
            split_best_tokens + row * num_splits + split, mask=split < num_splits, other=NO_TOKEN
        )
        score, token = tl_argmax(scores, tokens)
        cut = tl.full((), -float("inf"), tl.float32)
    else:
        of_row = group_max + row * num_groups
        # merge the maxima of adjacent groups until they fit in registers
        together: tl.constexpr = max(groups_block // _SEARCH_BLOCK, 1)
        begin = tl.arange(0, groups_block // together) * together
        best = load_or_neg_inf(of_row, begin, num_groups)
        for i in tl.static_range(1, together):
            best = tl.maximum(best, load_or_neg_inf(of_row, begin + i, num_groups))
        peak = tl.max(best)
        total = tl.full((), 1.0, tl.float32)
        if cuts % 4 == 2:
            peaks = load_or_neg_inf(split_stats + (row * 3 + 1) * num_splits, split, num_splits)
            sums = tl.load(
                split_stats + (row * 3 + 2) * num_splits + split, mask=split < num_splits, other=0.0
            )
            total = tl.sum(sums * tl.exp(peaks - peak))
        k = tl.load(top_ks + row).to(tl.float32)
        p = tl.load(top_ps + row)
        # -inf if min-p is off
        floor = peak + tl.log(tl.load(min_ps + row))
        low, high = _threshold_bounds(best, peak, cuts, k, p, total, floor, vocab)
        own = candidate_groups + row * num_groups
        count = _list_candidate_groups(of_row, own, num_groups, _key_to_float(low))
        line = logits + row * stride
        if count <= _MAX_REGISTER_GROUPS:
            tokens, inside = _candidate_tokens(own, 0, count, vocab)
            values = _load_logits(line, tokens, inside)
            if cuts % 2 == 1:
                low = _search_threshold(values, None, k, low, high)
            if cuts % 4 >= 2:
                mass = tl.where(values >= _key_to_float(low), tl.exp(values - peak), 0.0)
                if cuts % 2 == 1:
                    total = tl.sum(mass)
                low = _search_threshold(values, mass, p * total, low, high)
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
        token = tl.full((), NO_TOKEN, tl.int32)
        for start in range(0, count, _MAX_REGISTER_GROUPS):
            tokens, inside = _candidate_tokens(own, start, count, vocab)
            values = _load_logits(line, tokens, inside)
            scores = _gumbel_scores(values, tokens, temperature, row, seed_hashes, positions)
            here, first = tl_argmax(tl.where(values >= cut, scores, -float("inf")), tokens)
            token = tl.where(here > score, first, token)
            score = tl.maximum(here, score)
        # all tokens are at -inf: a tie, so token 0
        token = tl.where(score < FLOAT32_MIN, 0, token)
    tl.store(sampled_tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(min_logits + row, cut)


@triton.jit
def load_or_neg_inf(start, at, size):
    return tl.load(start + at, mask=at < size, other=-float("inf"))


@triton.jit
def _load_logits(row_logits, tokens, inside):
    return tl.load(row_logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _truncation_flags(row, vocab, top_ks, top_ps, min_ps):
    """Return the truncation of a row as bit flags: 1 top-k, 2 top-p, 4 min-p."""
    k = tl.load(top_ks + row)
    cuts = tl.where((k > 0) & (k < vocab), 1, 0)
    cuts += tl.where(tl.load(top_ps + row) < 1, 2, 0)
    return cuts + tl.where(tl.load(min_ps + row) > 0, 4, 0)


@triton.jit
def _gumbel_scores(values, tokens, temperature, row, seed_hashes, positions):
    noise = tl_gumbel_noise(tl.load(seed_hashes + row), tl.load(positions + row), tokens)
    return values / temperature + noise


@triton.jit
def tl_argmax(scores, tokens):
    """Return the best score and its token; the lowest token on ties."""
    score = tl.max(scores)
    return score, tl.min(tl.where(scores == score, tokens, NO_TOKEN))


@triton.jit
def _float_to_key(x):
    """Map float32 to an int64 key with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _key_to_float(key):
    """Inverse of `_float_to_key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold_bounds(best, peak, cuts, k, p, total, floor, vocab):
    """Return keys (low, high) that enclose the threshold; low leaves few groups if possible."""
    lowest, high = _float_to_key(tl.full((), FLOAT32_MIN, tl.float32)), _float_to_key(peak)
    low = lowest
    if cuts % 2 == 1:
        # k group maxima reach this bound, so at least k tokens do
        low, _ = _narrow_bounds(best, None, k, low, high, 0, _ENOUGH_GROUPS)
    elif cuts % 4 == 2:
        # all tokens below this distance from the best have a total mass of less than 1 - p
        tail = tl.log(1.0 - p) - tl.log(vocab.to(tl.float32)) - 1.0
        low = tl.maximum(lowest, _float_to_key(peak + tail))
        mass = tl.exp(best - peak)
        low, _ = _narrow_bounds(best, mass, p * total, low, high, 0, _ENOUGH_GROUPS)
    else:
        low = tl.maximum(lowest, _float_to_key(floor))
    return low, high


@triton.jit
def _search_threshold(values, weights, target, low, high):
    """Return the largest key <= high such that the values from it up weigh >= target.

    If there is none: low, or a higher key with no value between. weights: None weighs each as 1.
    """
    low, high = _narrow_bounds(values, weights, target, low, high, 0xFFFF, 0)
    lowest, highest = _key_to_float(low), _key_to_float(high)
    between = (values >= lowest) & (values <= highest)
    # if there is no value between them, the target is not reached: both become low
    least = tl.min(tl.where(between, values, float("inf")))
    high = tl.maximum(low, _float_to_key(tl.max(tl.where(between, values, -float("inf")))))
    low = tl.minimum(high, tl.maximum(low, _float_to_key(least)))
    low, high = _narrow_bounds(values, weights, target, low, high, 0, 0)
    return low


@triton.jit
def _narrow_bounds(
    values, weights, target, low, high, most_apart: tl.constexpr, stop_count: tl.constexpr
):
    """Narrow the bounds of `_search_threshold` until they differ by at most most_apart.

    stop_count: stop early at a low that leaves at most this many values; 0 disables it.
    """
    while high - low > most_apart:
        step = (high - low) // (_NUM_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _NUM_PIVOTS) + 1)
        above = values[None, :] >= _key_to_float(keys)[:, None]
        if weights is None:
            weight_above = tl.sum(above.to(tl.float32), 1)
        else:
            weight_above = tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        enough = (weight_above >= target) & (keys <= high)
        low, high = _next_bounds(enough, low, high, step)
        if stop_count > 0:
            count = weight_above if weights is None else tl.sum(above.to(tl.float32), 1)
            high = tl.where(tl.sum((enough & (count <= stop_count)).to(tl.int32)) > 0, low, high)
    return low, high


@triton.jit
def _next_bounds(enough, low, high, step):
    """Narrow the bounds, given which pivots (low + step, low + 2 * step, ...) reach the target.

    low + (number of pivots + 1) * step must exceed high, so that the pivots cover the whole range.
    """
    met = tl.sum(enough.to(tl.int32))
    low += step * met
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _search_threshold_in_memory(
    row_logits, candidate_groups, count, vocab, peak, target, low, high, by_mass: tl.constexpr
):
    """`_search_threshold` over the tokens of all candidate groups, read again on every iteration.

    by_mass: weigh tokens by exp(logit - peak) instead of 1.
    """
    while low < high:
        step = (high - low) // (_NUM_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _NUM_PIVOTS) + 1)
        weight_above = tl.zeros([_NUM_PIVOTS], tl.float32)
        for start in range(0, count, _MAX_REGISTER_GROUPS):
            tokens, inside = _candidate_tokens(candidate_groups, start, count, vocab)
            values = _load_logits(row_logits, tokens, inside)
            weights = tl.exp(values - peak) if by_mass else tl.full(values.shape, 1.0, tl.float32)
            above = values[None, :] >= _key_to_float(keys)[:, None]
            weight_above += tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        low, high = _next_bounds((weight_above >= target) & (keys <= high), low, high, step)
    return low


@triton.jit
def _list_candidate_groups(row_group_max, candidate_groups, num_groups, min_logit):
    """Store the groups whose maximum is at least min_logit, in order; return their count."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_groups, _LIST_BLOCK):
        group = start + tl.arange(0, _LIST_BLOCK)
        listed = (load_or_neg_inf(row_group_max, group, num_groups) >= min_logit).to(tl.int32)
        tl.store(candidate_groups + count + tl.cumsum(listed, 0) - 1, group, mask=listed > 0)
        count += tl.sum(listed)
    # other threads read the entries that this thread stored
    tl.debug_barrier()
    return count


@triton.jit
def _candidate_tokens(candidate_groups, start, count, vocab):
    """Return the tokens of MAX_REGISTER_GROUPS candidate groups from start on, and their mask."""
    at = tl.arange(0, _REGISTER_TOKENS)
    place = start + at // _GROUP_TOKENS
    group = tl.load(candidate_groups + place, mask=place < count, other=0)
    tokens = group * _GROUP_TOKENS + at % _GROUP_TOKENS
    return tokens, (place < count) & (tokens < vocab)
