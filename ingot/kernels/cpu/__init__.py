"""The `cpu` provider: C++ kernels for float32 and bfloat16, batch-invariant and memory-bound.

Each family has a source, `<family>.cpp`, and a module that registers its kernels, `<family>.py`.
`vector.h` has the arithmetic for all ISA tiers, `matmul.h` the GEMM, `threads.h` the thread pool,
`torch_abi.h`, `tensor.h` and `registration.h` the interface to torch. `build.py` builds a family on
first use.

Batch invariance: each element is computed in a fixed order that depends only on the op and the
tier. Kernels are parallel over rows, columns and heads, never over the reduction dimension, and the
tail of a row goes through the same vector arithmetic as its middle, padded with zeros.
"""

from __future__ import annotations

PRIORITY = 30
