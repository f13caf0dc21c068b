"""The kernels that sampling consists of: no sort, nothing asked of the host.

Two launches. `scan` reads every logit once: the best of every group of GROUP tokens, and for rows
without truncation the token itself, chunk by chunk. `choose` has one program a row. What top-k or
top-p cuts off is a threshold on the logits, found by bisection over their bits as integers: first
over the groups' best, which bounds it from below and leaves few groups (at most k hold any of the
k best tokens), then over the tokens of these, in registers. Where too many groups are left (a
large k, a flat distribution under top-p alone) they are read again for every four pivots.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from localgen.backends.cuda.kernels.sampling.gumbel import tl_gumbel

GROUP = 64
# groups whose tokens `choose` holds in registers
HELD = 64
PIVOTS = 4

_GROUP, _HELD, _PIVOTS = map(tl.constexpr, (GROUP, HELD, PIVOTS))
_TILE = tl.constexpr(GROUP * HELD)
# groups' best that are searched at once, and groups listed at once
_SEARCHED, _LISTED = tl.constexpr(1024), tl.constexpr(1024)
# the search for candidates may end with so many: the best of several groups is not all of them
_FEW = tl.constexpr(HELD * 7 // 8)
# rows of packed copies: where they begin must not decide what is compiled
_SETTINGS = ["temperatures", "top_ks", "top_ps", "min_ps", "mixes", "positions"]
_EDITED = ["rows", "tokens", "counts", "biases", "repeat", "presence", "frequency"]
_NO_TOKEN = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["edits"], do_not_specialize_on_alignment=_EDITED)
def edit(
    logits,
    stride,
    rows,
    tokens,
    counts,
    biases,
    repeat,
    presence,
    frequency,
    edits,
    block: tl.constexpr,
):
    """Penalties and biases, an element for each (row, token) that has any; in place."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < edits
    row = tl.load(rows + at, mask=inside, other=0)
    place = logits + row.to(tl.int64) * stride + tl.load(tokens + at, mask=inside, other=0)
    count = tl.load(counts + at, mask=inside, other=0.0)
    value = tl.load(place, mask=inside, other=0.0)
    by = tl.load(repeat + row, mask=inside, other=1.0)
    seen = tl.where(value > 0, tl.div_rn(value, by), value * by)
    seen -= count * tl.load(frequency + row, mask=inside, other=0.0)
    seen -= tl.load(presence + row, mask=inside, other=0.0)
    value = tl.where(count > 0, seen, value) + tl.load(biases + at, mask=inside, other=0.0)
    tl.store(place, value, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def scan(
    logits,
    stride,
    vocab,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    mixes,
    positions,
    group_best,
    partials,
    best_tokens,
    splits,
    groups,
    chunk_groups: tl.constexpr,
):
    """A chunk of a row.

    group_best: float32 [rows, groups]. partials: float32 [rows, 3, splits]: the best score, the
    largest logit, and the sum of exp(logit - largest). best_tokens: int32 [rows, splits].
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = split * chunk_groups + tl.arange(0, chunk_groups)
    tokens = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = _logits(logits + row * stride, tokens, tokens < vocab)
    best = tl.max(values, 1)
    tl.store(group_best + row * groups + group, best, mask=group < groups)
    temperature = tl.load(temperatures + row)
    cuts = _cuts(row, vocab, top_ks, top_ps, min_ps)
    partial = partials + row * 3 * splits + split
    if (temperature == 0) | (cuts == 0):
        scores = values
        if temperature > 0:
            scores = _scores(values, tokens, temperature, row, mixes, positions)
        score, token = _best(scores, tokens)
        tl.store(partial, score)
        tl.store(best_tokens + row * splits + split, token)
    elif cuts % 4 == 2:
        peak = tl.max(best)
        total = tl.sum(tl.exp(values - tl.where(peak < _LOWEST, 0.0, peak)))
        tl.store(partial + splits, peak)
        tl.store(partial + 2 * splits, total)


@triton.jit(
    do_not_specialize=["stride", "vocab", "splits", "groups"],
    do_not_specialize_on_alignment=_SETTINGS,
)
def choose(
    logits,
    stride,
    vocab,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    mixes,
    positions,
    group_best,
    partials,
    best_tokens,
    splits,
    groups,
    candidates,
    chosen,
    least,
    splits_block: tl.constexpr,
    groups_block: tl.constexpr,
):
    """The token of a row: int64 chosen[row]; the lowest logit that is kept: float32 least[row].

    candidates: int32 [rows, groups], for notes.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    cuts = _cuts(row, vocab, top_ks, top_ps, min_ps)
    split = tl.arange(0, splits_block)
    if (temperature == 0) | (cuts == 0):
        scores = _within(partials + row * 3 * splits, split, splits)
        tokens = tl.load(best_tokens + row * splits + split, mask=split < splits, other=_NO_TOKEN)
        score, token = _best(scores, tokens)
        cut = tl.full((), -float("inf"), tl.float32)
    else:
        of_row = group_best + row * groups
        # the best of every few groups, as many as fit in registers
        together: tl.constexpr = max(groups_block // _SEARCHED, 1)
        begin = tl.arange(0, groups_block // together) * together
        best = _within(of_row, begin, groups)
        for i in tl.static_range(1, together):
            best = tl.maximum(best, _within(of_row, begin + i, groups))
        peak = tl.max(best)
        total = tl.full((), 1.0, tl.float32)
        if cuts % 4 == 2:
            peaks = _within(partials + (row * 3 + 1) * splits, split, splits)
            sums = tl.load(
                partials + (row * 3 + 2) * splits + split, mask=split < splits, other=0.0
            )
            total = tl.sum(sums * tl.exp(peaks - peak))
        k = tl.load(top_ks + row).to(tl.float32)
        p = tl.load(top_ps + row)
        # -inf without min-p
        floor = peak + tl.log(tl.load(min_ps + row))
        low, high = _bounds(best, peak, cuts, k, p, total, floor, vocab)
        own = candidates + row * groups
        count = _list(of_row, own, groups, _number(low))
        line = logits + row * stride
        if count <= _HELD:
            tokens, inside = _candidates(own, 0, count, vocab)
            values = _logits(line, tokens, inside)
            if cuts % 2 == 1:
                low = _search(values, tl.full(values.shape, 1.0, tl.float32), k, low, high, 0)
            if cuts % 4 >= 2:
                mass = tl.where(values >= _number(low), tl.exp(values - peak), 0.0)
                if cuts % 2 == 1:
                    total = tl.sum(mass)
                low = _search(values, mass, p * total, low, high, 0)
        else:
            if cuts % 2 == 1:
                low = _far_search(line, own, count, vocab, peak, k, low, high, False)
            if cuts % 4 >= 2:
                if cuts % 2 == 1:
                    total = tl.full((), 0.0, tl.float32)
                    for start in range(0, count, _HELD):
                        tokens, inside = _candidates(own, start, count, vocab)
                        values = _logits(line, tokens, inside)
                        total += tl.sum(
                            tl.where(values >= _number(low), tl.exp(values - peak), 0.0)
                        )
                low = _far_search(line, own, count, vocab, peak, p * total, low, high, True)
        cut = tl.maximum(_number(low), floor)
        score = tl.full((), -float("inf"), tl.float32)
        token = tl.full((), _NO_TOKEN, tl.int32)
        for start in range(0, count, _HELD):
            tokens, inside = _candidates(own, start, count, vocab)
            values = _logits(line, tokens, inside)
            scores = _scores(values, tokens, temperature, row, mixes, positions)
            here, first = _best(tl.where(values >= cut, scores, -float("inf")), tokens)
            token = tl.where(here > score, first, token)
            score = tl.maximum(here, score)
        # where everything is banned, the first as of any tie
        token = tl.where(score < _LOWEST, 0, token)
    tl.store(chosen + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(least + row, cut)


@triton.jit
def _within(start, at, size):
    return tl.load(start + at, mask=at < size, other=-float("inf"))


@triton.jit
def _logits(line, tokens, inside):
    return tl.load(line + tokens, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _cuts(row, vocab, top_ks, top_ps, min_ps):
    """What truncates this row: 1 for top-k, 2 for top-p, 4 for min-p, added up."""
    k = tl.load(top_ks + row)
    cuts = tl.where((k > 0) & (k < vocab), 1, 0)
    cuts += tl.where(tl.load(top_ps + row) < 1, 2, 0)
    return cuts + tl.where(tl.load(min_ps + row) > 0, 4, 0)


@triton.jit
def _scores(values, tokens, temperature, row, mixes, positions):
    noise = tl_gumbel(tl.load(mixes + row), tl.load(positions + row), tokens)
    return values / temperature + noise


@triton.jit
def _best(scores, tokens):
    """The best score and its token, the lowest of several."""
    score = tl.max(scores)
    return score, tl.min(tl.where(scores == score, tokens, _NO_TOKEN))


@triton.jit
def _key(x):
    """A float32's bits as an int64 that is ordered as floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bounds(best, peak, cuts, k, p, total, floor, vocab):
    """Keys that the threshold lies between; the lower one leaves few groups, if it can."""
    lowest, high = _key(tl.full((), _LOWEST, tl.float32)), _key(peak)
    low = lowest
    if cuts % 2 == 1:
        # k groups have a token as good as this: so have k tokens
        low = _search(best, tl.full(best.shape, 1.0, tl.float32), k, low, high, _FEW)
    elif cuts % 4 == 2:
        # all tokens together that are so far below the best one weigh less than 1 - p
        tail = tl.log(1.0 - p) - tl.log(vocab.to(tl.float32)) - 1.0
        low = tl.maximum(lowest, _key(peak + tail))
        low = _search(best, tl.exp(best - peak), p * total, low, high, _FEW)
    else:
        low = tl.maximum(lowest, _key(floor))
    return low, high


@triton.jit
def _narrowed(enough, low, high, step):
    """The bounds after it is known which of the pivots, step apart above low, are met.

    One step more than there are pivots must be beyond high: then nothing up to high is left out.
    """
    met = tl.sum(enough.to(tl.int32))
    low += step * met
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _search(values, weights, target, low, high, few: tl.constexpr):
    """The greatest key up to high from which on the values weigh at least target; low if none.

    few: stop early where no more values than this are left; 0: never.
    """
    while low < high:
        step = (high - low) // (_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _PIVOTS) + 1)
        above = values[None, :] >= _number(keys)[:, None]
        weighed = tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        enough = (weighed >= target) & (keys <= high)
        low, high = _narrowed(enough, low, high, step)
        if few > 0:
            count = tl.sum(above.to(tl.int32), 1)
            high = tl.where(tl.sum((enough & (count <= few)).to(tl.int32)) > 0, low, high)
    return low


@triton.jit
def _far_search(line, own, count, vocab, peak, target, low, high, by_mass: tl.constexpr):
    """As _search, over the tokens of all candidate groups, read again for every pivots."""
    while low < high:
        step = (high - low) // (_PIVOTS + 1) + 1
        keys = low + step * (tl.arange(0, _PIVOTS) + 1)
        weighed = tl.zeros([_PIVOTS], tl.float32)
        for start in range(0, count, _HELD):
            tokens, inside = _candidates(own, start, count, vocab)
            values = _logits(line, tokens, inside)
            weights = tl.exp(values - peak) if by_mass else tl.full(values.shape, 1.0, tl.float32)
            above = values[None, :] >= _number(keys)[:, None]
            weighed += tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        low, high = _narrowed((weighed >= target) & (keys <= high), low, high, step)
    return low


@triton.jit
def _list(of_row, own, groups, least):
    """Write down the groups whose best is at least this, in order; how many there are."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, groups, _LISTED):
        group = start + tl.arange(0, _LISTED)
        listed = (_within(of_row, group, groups) >= least).to(tl.int32)
        tl.store(own + count + tl.cumsum(listed, 0) - 1, group, mask=listed > 0)
        count += tl.sum(listed)
    # other threads read what this one has listed
    tl.debug_barrier()
    return count


@triton.jit
def _candidates(own, start, count, vocab):
    """Tokens of the candidate groups from start on, and which of them are there."""
    at = tl.arange(0, _TILE)
    place = start + at // _GROUP
    group = tl.load(own + place, mask=place < count, other=0)
    tokens = group * _GROUP + at % _GROUP
    return tokens, (place < count) & (tokens < vocab)
