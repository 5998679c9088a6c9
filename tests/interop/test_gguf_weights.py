from __future__ import annotations

import numpy as np
import torch

from ingot.interop.gguf_weights import MAX_MAGNITUDE, to_bfloat16_bits


def test_bfloat16_rounding_matches_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.abs(values) < MAX_MAGNITUDE]
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16_bits(values), expected)
