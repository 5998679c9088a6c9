"""Register the C++ kernels of `sample`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.dispatch import always

cpu(ops.apply_penalties)
cpu(ops.sampling_logprobs, backward=always)
cpu(ops.philox_uniform)
cpu(ops.sample)
