"""Register the C++ kernels of `loss`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu, in_bf16
from ingot.ops.dispatch import always

cpu(ops.token_logprobs, backward=always)
cpu(ops.cross_entropy, backward=always)
cpu(ops.linear_logits)
cpu(ops.linear_token_logprobs, backward=in_bf16)
cpu(ops.linear_cross_entropy, backward=in_bf16)
cpu(ops.linear_cross_entropy_fwd_bwd)
