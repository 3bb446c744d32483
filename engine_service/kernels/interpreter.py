"""What Triton's interpreter gets wrong, and what it does again and again; `mend` once per process.

It runs kernels as numpy programs (TRITON_INTERPRET=1), for tests. Nothing here changes what a
kernel computes or what is checked of it; where Triton 3.6 repeats work, it is done once: three
quarters of the time that small tiles took.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["mend"]


def _index_scalars(patch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter's scalars are arrays of one element, which NumPy 2.4 and up no longer takes
    as loop bounds."""

    def patch_tensor(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    return patch_tensor


def _widen_bfloat16(dot: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter keeps bfloat16 as integers and would multiply those."""

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            builder.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)
        )
        return dot(builder, a, b, *rest)

    return create_dot


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The language is made numpy's for good, rather than at every launch and every call within it;
    in a process that interprets, nothing else asks for it."""
    patched: list[Any] = []

    def patch_lang(function: Any) -> Any:
        if not patched:
            patched.append(patch(SimpleNamespace(__globals__={"tl": tl, "core": core})))
        return interpreter._LangPatchScope()

    return patch_lang


def _remember_types(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's type for one of Triton's, without a table made for every question."""
    known = lru_cache(maxsize=None)(dtype_of)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar if isinstance(kind, core.block_type) else kind
        return dtype_of(scalar) if isinstance(scalar, core.pointer_type) else known(scalar)

    return numpy_type


def _remember_blocks(make: Callable[..., None]) -> Callable[..., None]:
    """Types of blocks are equal where their elements and shapes are: they share one's facts."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(element_ty, core.pointer_type):  # has no hash: every argument has its own
            make(block, element_ty, shape)
            return
        key = (element_ty, *map(core._unwrap_if_constexpr, shape))
        if key not in known:
            make(block, element_ty, shape)
            known[key] = dict(vars(block))
        vars(block).update(known[key])

    return init


@cache
def _shape_of(*sizes: int) -> tuple[Any, Any]:
    """As a tensor has them: its shape, and its number of elements."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shape_of(*(kind.shape if kind.is_block() else ()))


def _assert_in_debug(check: Callable[..., None]) -> Callable[..., None]:
    """The interpreter computes whether integers overflow, and asserts it in debug mode alone."""

    def check_overflow(semantic: Any, *operands: Any) -> None:
        if semantic.builder.options.debug:
            check(semantic, *operands)

    return check_overflow


def mend() -> None:
    """Changes the interpreter of this process, once: Triton was imported with TRITON_INTERPRET."""
    interpreter._patch_lang_tensor = _index_scalars(interpreter._patch_lang_tensor)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _widen_bfloat16(builder.create_dot)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remember_types(interpreter._get_np_dtype)
    core.block_type.__init__ = _remember_blocks(core.block_type.__init__)
    core.tensor.__init__ = _init_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = _assert_in_debug(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )
