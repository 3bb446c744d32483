"""cuBLASLt called directly: products by a kernel that the caller names.

torch takes the kernel that the library guesses to be fastest. What is here runs the library's
kernels for Hopper (its algorithm 66) by the size of their tiles, without splitting the inputs: all
of them add in the same order, so that a product has the same bits whichever is taken.

It does not know which one to take. Numbers are those of cublasLt.h of CUDA 13, with whose library
they were tried; shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_ALGORITHM, _STAGES_AUTO, _ONE_BY_ONE = 66, 35, 2
_COMPUTE_32F, _SCALE_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""cudaDataType_t of the number formats that have these kernels."""
_TRANSA, _OP_T = 3, 1
_TILE_ID, _CUSTOM_OPTION, _STAGES_ID, _CLUSTER_SHAPE_ID = 1, 5, 6, 8
_LAYOUT_BYTES, _ALGO_BYTES, _RESULT_BYTES = 64, 64, 96
_WORKSPACE_AT, _STATE_AT = 64, 72
"""Of cublasLtMatmulHeuristicResult_t: a size_t and a status behind the algorithm."""
_WORKSPACE_BYTES = 256
"""These kernels want 4: the number of the next tile."""

_LIBRARY = "libcublasLt.so.13"
_FUNCTIONS = (
    "cublasLtCreate",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulAlgoInit",
    "cublasLtMatmulAlgoConfigSetAttribute",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatrixLayoutInit_internal",
    "cublasLtMatmul",
)

_TILES = {
    (64, 16): 312,
    (64, 32): 13,
    (64, 64): 15,
    (64, 128): 17,
    (80, 64): 134,
    (96, 64): 27,
    (96, 128): 28,
    (128, 16): 394,
    (128, 32): 16,
    (128, 64): 18,
    (128, 128): 20,
    (192, 64): 208,
}


class Cut(NamedTuple):
    """One of the library's kernels, by the tile that a multiprocessor computes at a time."""

    outputs: int
    rows: int
    option: int
    """Its custom option. What it means is not documented; it moves the time by some percent."""


class Library:
    """A handle of cuBLASLt on one device."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        """Raises RuntimeError or AttributeError where the library has no such interface."""
        self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        self.device, self.handle = device, ctypes.c_void_p()
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.operation = ctypes.c_void_p()
        kinds = (_COMPUTE_32F, _SCALE_32F)
        self.call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), *kinds)
        self._set("MatmulDesc", self.operation, _TRANSA, ctypes.c_int32(_OP_T))
        self.matmul = self._functions["cublasLtMatmul"]
        pointers = [ctypes.c_void_p] * 14
        self.matmul.argtypes = [*pointers, ctypes.c_size_t, ctypes.c_void_p]
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def product(
        self, cut: Cut, dtype: torch.dtype, num_rows: int, out_size: int, in_size: int
    ) -> Product | None:
        """By this kernel; None where the library does not have it for these sizes."""
        kind = _TYPES.get(dtype)
        if kind is None:
            return None
        try:
            algorithm = self._algorithm(cut, kind)
            # The library's matrices are column-major: a row-major [M, N] is its N x M.
            sizes = ((in_size, out_size), (in_size, num_rows), (out_size, num_rows))
            layouts = [self._layout(kind, *size) for size in sizes]
        except RuntimeError:
            return None
        return Product(self, algorithm, layouts) if self._accepts(algorithm, layouts) else None

    def _algorithm(self, cut: Cut, kind: int) -> Any:
        made = ctypes.create_string_buffer(_ALGO_BYTES)
        kinds = (_COMPUTE_32F, _SCALE_32F, kind, kind, kind, kind)
        self.call("cublasLtMatmulAlgoInit", self.handle, *kinds, _ALGORITHM, made)
        for name, value in (
            (_TILE_ID, ctypes.c_uint32(_TILES[cut.outputs, cut.rows])),
            (_STAGES_ID, ctypes.c_uint32(_STAGES_AUTO)),
            (_CUSTOM_OPTION, ctypes.c_uint32(cut.option)),
            (_CLUSTER_SHAPE_ID, ctypes.c_uint16(_ONE_BY_ONE)),
        ):
            self._set("MatmulAlgoConfig", made, name, value)
        return made

    def _layout(self, kind: int, rows: int, columns: int) -> Any:
        made = ctypes.create_string_buffer(_LAYOUT_BYTES)
        shape = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        size = ctypes.c_size_t(_LAYOUT_BYTES)
        self.call("cublasLtMatrixLayoutInit_internal", made, size, kind, *shape)
        return made

    def _accepts(self, algorithm: Any, layouts: list[Any]) -> bool:
        result = ctypes.create_string_buffer(_RESULT_BYTES)
        status = self._functions["cublasLtMatmulAlgoCheck"](
            self.handle, self.operation, *layouts, layouts[-1], algorithm, result
        )
        workspace = ctypes.c_size_t.from_buffer(result, _WORKSPACE_AT).value
        state = ctypes.c_int.from_buffer(result, _STATE_AT).value
        return not status and not state and workspace <= _WORKSPACE_BYTES

    def _set(self, of: str, what: Any, name: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLt{of}SetAttribute", what, name, ctypes.byref(value), size)

    def call(self, function: str, *arguments: Any) -> None:
        """Raises RuntimeError with the library's status."""
        status = self._functions[function](*arguments)
        if status:
            raise RuntimeError(f"{function} ended with status {status}")


class Product:
    """out [M, N] = x [M, K] W [N, K]^T, or out += that, of one size by one kernel."""

    def __init__(self, library: Library, algorithm: Any, layouts: list[Any]) -> None:
        """`layouts` are those of W, x and out."""
        self._library = library
        self._kept = (algorithm, *layouts, ctypes.c_float(0.0), ctypes.c_float(1.0))
        addresses = [ctypes.addressof(one) for one in self._kept]
        self._algorithm, self._weight, self._x, self._out, *self._factors = addresses
        self._workspace = library.workspace.data_ptr()

    def __call__(
        self, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor, *, adds: bool
    ) -> bool:
        """Launches it on the current stream; False, and nothing is launched, where the library
        refuses. All three are contiguous and start at 16 bytes; one stream at a time."""
        library, out = self._library, out_MN.data_ptr()
        status: int = library.matmul(
            library.handle,
            library.operation,
            self._factors[1],
            weight_NK.data_ptr(),
            self._weight,
            x_MK.data_ptr(),
            self._x,
            self._factors[adds],
            out,
            self._out,
            out,
            self._out,
            self._algorithm,
            self._workspace,
            _WORKSPACE_BYTES,
            torch.cuda.current_stream(library.device).cuda_stream,
        )
        return status == 0


@lru_cache(maxsize=8)
def open_library(device: torch.device) -> Library | None:
    """cuBLASLt as torch has loaded it; None where there is none, and for devices of another compute
    capability than 9, whose kernels these are."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        return Library(ctypes.CDLL(_LIBRARY), device)
    except (OSError, AttributeError, RuntimeError):
        return None
