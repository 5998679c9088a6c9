"""Tests of the record of an op: fields, defaults, fallback, errors, copies."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import OpError
from ingot.ops.dispatch import prefer
from ingot.ops.record import Tolerance


def test_looser_tolerance_requires_a_reason() -> None:
    with pytest.raises(OpError, match="looser than 2x/3x"):
        Tolerance(forward=4.0)
    assert Tolerance(forward=4.0, reason="a table lookup of 8 bits").forward == 4.0


def test_reference_rounds_half_precision_once() -> None:
    x = torch.randn(64, 64).bfloat16()
    with prefer("reference"):
        assert torch.equal(ops.silu(x), ops.silu.reference(x.float()).bfloat16())


def test_weight_on_meta_raises() -> None:
    """torch calls the fake for it, which would return uninitialized memory."""
    x, weight = torch.ones(2, 4), torch.ones(4, device="meta")
    with pytest.raises(OpError, match="rms_norm: tensors on cpu, meta"):
        ops.rms_norm(x, weight)
    assert ops.rms_norm(x.to("meta"), weight).is_meta


@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
@pytest.mark.parametrize("preferred", [None, "cpu"])
def test_error_of_a_kernel_has_a_hint(preferred: str | None) -> None:
    with prefer(preferred) if preferred else nullcontext(), pytest.raises(OpError) as refused:
        ops.softmax(torch.tensor(3.0))
    assert refused.value.message == "softmax: x must have at least one dimension"
    assert "ingot.ops.prefer('reference')" in refused.value.hint
    with prefer("reference"):
        assert ops.softmax(torch.tensor(3.0)) == 1


@pytest.mark.parametrize("preferred", [None, "cpu"])
def test_error_of_the_reference_takes_precedence(preferred: str | None) -> None:
    with prefer(preferred) if preferred else nullcontext():
        with pytest.raises(OpError, match="ops do not promote"):
            ops.rms_norm(torch.ones(2, 4), torch.ones(4).bfloat16())
        with pytest.raises(IndexError, match="out of range"):
            ops.embedding(torch.tensor([9]), torch.ones(4, 2))


def test_a_module_that_holds_an_op_can_be_copied_and_pickled() -> None:
    module = torch.nn.Module()
    module.__dict__["activation"] = ops.silu
    assert copy.deepcopy(module).activation is ops.silu
    assert pickle.loads(pickle.dumps(module)).activation is ops.silu
