from __future__ import annotations

import torch

from ingot.nn import LayerNorm, RMSNorm


def test_norms_match_torch() -> None:
    x = torch.randn(5, 12)
    torch.testing.assert_close(RMSNorm(12, 1e-3)(x), torch.nn.RMSNorm(12, 1e-3)(x))
    norm, theirs = LayerNorm(12, 1e-3), torch.nn.LayerNorm(12, 1e-3)
    with torch.no_grad():
        norm.bias.normal_()
    theirs.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))
