"""Split master weights: 16-bit integers, which the interpreter computes correctly."""

from __future__ import annotations

from ingot.kernels.triton.interpreter import Interpreter

CODE = """
import torch
from ingot.kernels.triton.adamw import adamw
from ingot.ops.adamw import adamw as op, join, split

random = torch.Generator().manual_seed(0)
sizes = (5000, 3, 16, 0, 2048)
masters = [torch.randn(size, generator=random) for size in sizes]
grads = [torch.randn(size, generator=random).bfloat16() for size in sizes]
grads[1], grads[4] = grads[1].float(), grads[4].float()  # another launch
moments = [[torch.rand(size, generator=random) for size in sizes] for _ in range(2)]
numbers = 7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5

def run(function, params, grads, low):
    first, second = ([m.clone() for m in some] for some in moments)
    function(params, grads, first, second, low, *numbers, None)
    return [*(map(join, params, low) if low else params), *first, *second]

high, low = ([split(master)[i] for master in masters] for i in (0, 1))
copies = [t.clone() for t in high], [t.clone() for t in low]
ours = run(adamw, high, grads, low)
same = run(adamw, [m.clone() for m in masters], [g.float() for g in grads], [])
theirs = run(op.reference, copies[0], [g.float() for g in grads], copies[1])
for one, other, expected in zip(ours, same, theirs, strict=True):
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    torch.testing.assert_close(one, expected, rtol=2e-6, atol=1e-6)
assert not torch.equal(ours[0], masters[0])

# Halfway between two bfloat16 values, with a zero update.
ties = (torch.arange(0x3F80, 0x4080, dtype=torch.int32) * 65536 + 0x8000).view(torch.float32)
ties = torch.cat([ties, -ties])
high, low = split(ties)
zeros = torch.zeros(len(ties))
moments = [zeros.clone()], [zeros.clone()]
adamw([high], [zeros], *moments, [low], 7, 0.0, 0.9, 0.95, 1e-8, 0.1, 1.0, None)
assert torch.equal(join(high, low), ties)
assert torch.equal(high, split(ties)[0])
"""


def test_split_master_weights_are_bitwise_equal_to_float32(interpreter: Interpreter) -> None:
    interpreter.call("run_code", code=CODE, env={})
