"""The papers' algorithms as they are written, in float64, without optimization."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Range = tuple[float, float]

SYMMETRIC = (3, 8)
FINE = [1.0 - step / 20 for step in range(11)]
FINER = [1.0 - step / 40 for step in range(21)]
COARSE = [1.0 - step / 10 for step in range(6)]


def digits_and_grid(w: Array, ends: Range, bits: int) -> tuple[Array, float, float]:
    """Codes, scale and zero of one group of weights on the grid from low to high; those of 3
    and 8 bits are symmetric."""
    low, high = ends
    top, middle, symmetric = 2**bits - 1, 2 ** (bits - 1), bits in SYMMETRIC
    shorter, longer = sorted((-low, high))
    scale = max(longer / middle, shorter / (middle - 1)) if symmetric else (high - low) / top
    scale = float(np.float16(max(scale or 1.0, 2.0**-24)))
    zero = float(middle) if symmetric else float(np.clip(np.round(-low / scale), 0, top))
    if symmetric and high > -low:
        scale = -scale
    return np.clip(np.round(w / scale) + zero, 0, top), scale, zero


def values(w: Array, ends: Range, bits: int) -> Array:
    digits, scale, zero = digits_and_grid(w, ends, bits)
    return (digits - zero) * scale


def best_range(w: Array, x: Array | None, ranges: Iterable[Range], bits: int) -> Range:
    """The first range with the least error: of the outputs for x [tokens, size], or of w."""

    def error(ends: Range) -> float:
        difference = values(w, ends, bits) - w
        return float(np.sum((difference if x is None else x @ difference) ** 2))

    return min(ranges, key=error)


def ends_of(w: Array) -> Range:
    return min(float(w.min()), 0.0), max(float(w.max()), 0.0)


def whole(w: Array, bits: int) -> Range:
    (low, high), top = ends_of(w), 2**bits - 1
    tried = [(low, high)]
    if bits in SYMMETRIC:
        most = max(-low, high) * (1 - 2 / 2**bits)
        tried.append((max(low, -most), high) if high > -low else (low, min(high, most)))
        return best_range(w, None, tried, bits)
    before = np.floor(-low * top / (high - low))
    for zero in (np.clip(before, 1, top - 1), np.clip(before + 1, 1, top - 1)):
        step = min(-low / zero, high / (top - zero))
        tried.append((-zero * step, (top - zero) * step))
    return best_range(w, None, tried, bits)


def searched(w: Array, bits: int) -> Range:
    """Scales of NeUQI's search, each with three integer zero points."""
    (low, high), top = ends_of(w), 2**bits - 1
    scale = (high - low) / top
    zeros = [float(np.clip(np.round(-low / scale) + step, 0, top)) for step in (-1, 0, 1)]
    shares = [1.0 - step / 20 for step in range(15)]
    tried = [(-z * scale * s, (top - z) * scale * s) for s in shares for z in zeros]
    low, high = best_range(w, None, [whole(w, bits), *tried], bits)
    finer = [(low * s, high * s) for s in (0.97, 0.985, 1.015, 1.03)]
    return best_range(w, None, [(low, high), *finer], bits)


def clipped(w: Array, x: Array | None, bits: int, *, coarse: bool = False) -> Range:
    low, high = ends_of(w)
    fine = FINE if x is None else FINER
    found = best_range(w, x, [(low * s, high * s) for s in (COARSE if coarse else fine)], bits)
    if coarse:
        return found
    found = best_range(w, x, [found, *((low * s, found[1]) for s in fine)], bits)
    return best_range(w, x, [found, *((found[0], high * s) for s in fine)], bits)


def gptq(
    weight: Array, hessian: Array, grids: tuple[Array, Array], *, bits: int, damping: float
) -> Array:
    """Digits [out, in] of Frantar et al. 2022 as optimal brain quantization in a fixed order.

    Without blocks and without Cholesky: after each column its row and column leave H⁻¹ by a step
    of Gaussian elimination (equation 3 of the paper). grids: scales and zeros, [out, groups].
    """
    w, ins = weight.copy(), weight.shape[1]
    scales, zeros = grids
    size = ins // scales.shape[1]
    inverse = np.linalg.inv(hessian + damping * np.mean(np.diag(hessian)) * np.eye(ins))
    digits = np.zeros_like(w)
    for column in np.argsort(-np.diag(hessian), kind="stable"):
        scale, zero = scales[:, column // size], zeros[:, column // size]
        digits[:, column] = np.clip(np.round(w[:, column] / scale) + zero, 0, 2**bits - 1)
        error = w[:, column] - (digits[:, column] - zero) * scale
        w -= np.outer(error / inverse[column, column], inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        # only rounding is left of it, which must not return
        inverse[column, :] = inverse[:, column] = 0.0
    return digits


def corrected(weight: Array, x: Array, original: Array, share: float, damping: float) -> Array:
    """The weight [out, in] whose outputs for x [tokens, in] are closest to those of `weight` for
    inputs moved by `share` towards the original model's: ridge regression, solved directly."""
    wanted = (x + share * (original - x)) @ weight.T
    ridge = np.sqrt(damping * np.mean(np.sum(x**2, 0))) * np.eye(x.shape[1])
    rows, outs = np.vstack([x, ridge]), np.vstack([wanted, ridge @ weight.T])
    return np.asarray(np.linalg.lstsq(rows, outs, rcond=None)[0].T)


def awq_scales(weights: list[Array], x: Array, *, bits: int, size: int, clip: bool) -> Array:
    """Scales [in] of Lin et al. 2023: the power of mean |x| with the least ‖(Q(Ws)/s - W)x‖²."""

    def error(scales: Array) -> float:
        total = 0.0
        for weight in weights:
            rounded = np.concatenate(
                [
                    awq_row(row * scales, x / scales, bits, size, clip, coarse=True)[1]
                    for row in weight
                ]
            ).reshape(weight.shape)
            total += float(np.sum((x @ (rounded / scales - weight).T) ** 2))
        return total

    magnitudes = np.abs(x).mean(0)

    def scales(power: float) -> Array:
        found = magnitudes**power
        return np.asarray(found / np.sqrt(found.max() * found.min()))

    best = min((step / 20 for step in range(21)), key=lambda power: error(scales(power)))
    around = [best, max(best - 1 / 40, 0.0), min(best + 1 / 40, 1.0)]
    return min(map(scales, around), key=error)


def awq_row(
    row: Array, x: Array, bits: int, size: int, clip: bool, *, coarse: bool = False
) -> tuple[Array, Array]:
    """Codes and values of one output's weights, group by group."""
    digits, rounded = [], []
    for at in range(0, len(row), size):
        w = row[at : at + size]
        ends = clipped(w, x[:, at : at + size], bits, coarse=coarse) if clip else whole(w, bits)
        digits.append(digits_and_grid(w, ends, bits)[0])
        rounded.append(values(w, ends, bits))
    return np.concatenate(digits), np.concatenate(rounded)
