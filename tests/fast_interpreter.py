"""Triton's interpreter without work that it repeats for each operation.

The kernel tests spend nearly all of their time in its Python code, not in numpy. And its products
of float32 do not depend on the processor.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# what the interpreter patches, before it does: device functions leave patches behind
_TL = interpreter.tl
_LANGUAGE = (_TL, _TL.core, _TL.math, _TL.core.tensor, _TL.core.dtype, _TL.condition)
_UNPATCHED = [(part, dict(vars(part))) for part in _LANGUAGE]
_INTEGER_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def speed_up() -> None:
    """Patch the interpreter of this process. What kernels compute and assert stays the same."""
    _round_products_once()
    _patch_language_once()
    _broadcast_only_other_shapes()
    _find_dtypes_once()
    _check_overflow_in_numpy()


def _round_products_once() -> None:
    """It multiplies float32 in numpy's BLAS, which sums in another order on other processors.

    Sums with an exponent's 1024 in them then differ by more than kernels may be wrong.
    """
    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_exactly(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        if not a.data.dtype == b.data.dtype == acc.data.dtype == np.float32:
            return multiply(self, a, b, acc, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64) + acc.data
        return interpreter.TensorHandle(product.astype(np.float32), acc.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_exactly


def restore_language() -> None:
    """Undo the interpreter's patches, for tests that compile kernels in this process."""
    for part, members in _UNPATCHED:
        for name, member in members.items():
            if vars(part).get(name) is not member:
                setattr(part, name, member)


def _patch_language_once() -> None:
    """It patches the language in each call of a device function again."""
    tl, patch = interpreter.tl, interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        used = [names[name] for name in ("tl", "core") if name in names]
        is_patched = used and not any(tl.core.is_builtin(lang.load) for lang in used)
        return None if is_patched else patch(function)

    interpreter._patch_lang = patch_once


def _broadcast_only_other_shapes() -> None:
    """It compares a tuple with a list, and so copies both operands of the same shape."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self: TritonSemantic[Any], lhs: Any, rhs: Any) -> Any:
        if (
            lhs.type.is_block()
            and rhs.type.is_block()
            and lhs.type.shape.values == rhs.type.shape.values
        ):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal


def _find_dtypes_once() -> None:
    """It makes a table of all types for each look-up."""
    find = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        if dtype.name not in by_name:
            by_name[dtype.name] = find(dtype)
        return by_name[dtype.name]

    interpreter._get_np_dtype = find_once


def _check_overflow_in_numpy() -> None:
    """It computes integers again in 64 bits, with its own operations, to see whether they fit."""

    @functools.wraps(TritonSemantic.binary_op_sanitize_overflow_impl)
    def check(self: TritonSemantic[Any], lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64:
            return
        compute = _INTEGER_OPERATIONS[binary_op.__name__]
        result = compute(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        assert scalar.get_int_min_value() <= result.min(), f"{binary_op.__name__}: underflow"
        assert result.max() <= scalar.get_int_max_value(), f"{binary_op.__name__}: overflow"

    TritonSemantic.binary_op_sanitize_overflow_impl = check
