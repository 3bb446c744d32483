"""What a kernel of many operations computes under Triton's interpreter, as it is or mended."""

from __future__ import annotations

import hashlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from engine_service.kernels import interpreter


@triton.jit
def _mix(x, y):  # type: ignore[no-untyped-def]
    return tl.where(x > y, x * y - x, tl.exp(-tl.abs(x)) + y)


@triton.jit
def _kernel(x_ptr, n_ptr, out_ptr, ids_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * BLOCK + columns, mask=columns < BLOCK - 3, other=0.5)
    n = tl.load(n_ptr + row * BLOCK + columns)
    wrapped = n * 1664525 + (n ^ (n >> 7)) - row
    square = tl.reshape(x, (BLOCK // 16, 16))
    product = tl.dot(square, tl.trans(square))
    total = tl.sum(product, axis=1)
    summed = tl.cumsum(x, axis=0)
    mixed = _mix(x.to(tl.float16).to(tl.float32), summed) + tl.sum(total, axis=0)
    for turn in tl.static_range(2):
        mixed += tl.max(mixed, axis=0) * turn
    tl.store(out_ptr + row * BLOCK + columns, mixed)
    tl.store(ids_ptr + row * BLOCK + columns, wrapped.to(tl.int64) + tl.argmax(x, axis=0))


if __name__ == "__main__":
    if "mended" in sys.argv[1:]:
        interpreter.mend()
    for seed in sys.argv[1:]:
        if seed == "mended":
            continue
        torch.manual_seed(int(seed))
        rows, block = 3, 256
        x, n = torch.randn(rows, block), torch.randint(-(2**31), 2**31, (rows, block)).int()
        out, ids = torch.empty(rows, block), torch.empty(rows, block, dtype=torch.int64)
        for _ in range(2):
            _kernel[(rows,)](x, n, out, ids, BLOCK=block)
            made = out.numpy().tobytes() + ids.numpy().tobytes()
            assert out.isfinite().all()
            print(hashlib.sha256(made).hexdigest())
