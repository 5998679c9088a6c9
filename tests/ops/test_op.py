"""The record itself: what it demands, how it dispatches, what it refuses."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import OpError, UnknownName
from ingot.ops import op as record
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import Cost, Op, Override, Tolerance, batch_invariant, fake_like, op, prefer


def samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(3, 4),))


def cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * x.nbytes, flops=x.numel())


def check(x: Tensor) -> None:
    pass


RECORD: dict[str, Any] = {
    "check": check,
    "fake": fake_like,
    "samples": samples,
    "tolerance": Tolerance(),
    "cost": cost,
    "row_args": ("x",),
}


@pytest.fixture(scope="module")
def made_up() -> Iterator[Op[..., Any]]:
    """An op in the registry while this file runs; torch knows its name for good."""

    @op(**RECORD)
    def made_up_double(x: Tensor) -> Tensor:
        return 2 * x

    yield made_up_double
    del record._REGISTRY["made_up_double"]


@pytest.mark.parametrize("missing", RECORD)
def test_an_op_without_one_of_its_fields_cannot_be_declared(missing: str) -> None:
    rest = {field: value for field, value in RECORD.items() if field != missing}
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        op(**rest)


def test_schema_comes_from_annotations() -> None:
    with pytest.raises(ValueError, match="x must have a type annotation"):

        @op(**RECORD)
        def untyped(x):
            return x


def test_keyword_only_parameters_are_refused() -> None:
    with pytest.raises(OpError, match="keyword-only"):

        @op(**RECORD)
        def keyword_only(x: Tensor, *, eps: float = 0.0) -> Tensor:
            return x + eps


def test_a_looser_tolerance_needs_a_reason() -> None:
    with pytest.raises(OpError, match="looser than 2x/3x"):
        Tolerance(forward=4.0)
    assert Tolerance(forward=4.0, reason="a table lookup of 8 bits").forward == 4.0


def test_a_declared_op_is_whole(made_up: Op[..., Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(made_up(x).sum(), x)
    assert torch.equal(grad, torch.full((3, 4), 2.0))
    assert ops.registry()["made_up_double"] is made_up
    assert list(made_up.providers) == ["reference"]


def test_the_first_call_of_an_op_may_be_a_compiled_one() -> None:
    """In a new process: nothing that is made at the first call may need tracing."""
    code = (
        "import torch\n"
        "from ingot import ops\n"
        "f = torch.compile(lambda x: ops.silu(x), fullgraph=True, backend='aot_eager')\n"
        "f(torch.ones(2, 3, requires_grad=True)).sum().backward()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_providers_are_chosen_in_order_of_preference() -> None:
    x = torch.randn(2, 4)
    assert ops.softmax.select(x, 1.0, None).name == "cpu"
    half = x.half()  # the C++ kernels leave float16 to PyTorch
    assert ops.softmax.select(half, 1.0, None).name == "aten"
    assert ops.softmax.select(half, 1.0, x > 0).name == "reference"  # aten supports no mask
    with prefer("reference"):
        assert ops.softmax.select(x, 1.0, None).name == "reference"
    assert ops.softmax.select(x, 1.0, None).name == "cpu"


def test_a_provider_is_ahead_for_its_calls_unless_exactness_is_asked_for(
    made_up: Op[..., Any],
) -> None:
    def forward(x: Tensor) -> Tensor:
        return x + x

    def backward(needs: list[bool], grads: list[Tensor], x: Tensor) -> list[Tensor]:
        chosen.append("aten")
        return [2 * grads[0]]

    chosen: list[str] = []
    preferred_for = Override(when=lambda x: len(x) > 2, reason="many rows")
    made_up.provide("triton", forward, batch_invariant=True)
    made_up.provide(
        "aten", forward, batch_invariant=False, backward=backward, preferred_for=preferred_for
    )
    made_up.__dict__.pop("providers", None)
    try:
        many, few = torch.ones(3, 4), torch.ones(2, 4)
        assert [made_up.select(x).name for x in (many, few)] == ["aten", "triton"]
        with batch_invariant():
            assert made_up.select(many).name == "triton"
            with prefer("aten"):  # asked for by name
                assert made_up.select(many).name == "aten"
        assert made_up.select(many).name == "aten"
        with torch.inference_mode():  # all serving
            assert made_up.select(many).name == "triton"
        x = torch.ones(3, 4, requires_grad=True)
        made_up(x).sum().backward()
        assert chosen == ["aten"]
        with batch_invariant():
            y = made_up(x)
        made_up.provide(
            "triton", forward, batch_invariant=True, backward=lambda n, g, x: [2 * g[0]]
        )
        made_up.__dict__.pop("providers", None)
        y.sum().backward()  # outside, and still exact
        assert chosen == ["aten"]
    finally:
        for name in ("triton", "aten"):
            del made_up._registered[name]
        made_up.__dict__.pop("providers", None)


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'aten'"), prefer("atten"):
        pass
    with pytest.raises(UnknownName, match="unknown provider"):
        ops.silu.provide("mps", lambda x: x, batch_invariant=False)


def test_half_precision_is_rounded_once_by_the_reference() -> None:
    x = torch.randn(64, 64).bfloat16()
    with prefer("reference"):
        assert torch.equal(ops.silu(x), ops.silu.reference(x.float()).bfloat16())


def test_an_op_without_a_gradient_says_so() -> None:
    logits = torch.randn(1, 4, requires_grad=True)
    one, zero = torch.ones(1), torch.zeros(1)
    result = ops.sampling_logprobs(logits, one, torch.tensor([4]), one, zero)
    with pytest.raises(OpError, match="no gradient"):
        result.sum().backward()


def test_a_weight_without_memory_is_refused() -> None:
    """torch calls the fake for it, which would return memory that nobody has written."""
    x, weight = torch.ones(2, 4), torch.ones(4, device="meta")
    with pytest.raises(OpError, match="rms_norm: tensors on cpu, meta"):
        ops.rms_norm(x, weight)
    assert ops.rms_norm(x.to("meta"), weight).is_meta


@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
@pytest.mark.parametrize("preferred", [None, "cpu"])
def test_what_only_a_kernel_refuses_has_a_hint(preferred: str | None) -> None:
    with prefer(preferred) if preferred else nullcontext(), pytest.raises(OpError) as refused:
        ops.softmax(torch.tensor(3.0))
    assert refused.value.message == "softmax: x must have at least one dimension"
    assert "ingot.ops.prefer('reference')" in refused.value.hint
    with prefer("reference"):
        assert ops.softmax(torch.tensor(3.0)) == 1


@pytest.mark.parametrize("preferred", [None, "cpu"])
def test_what_the_reference_refuses_too_is_said_as_it_says_it(preferred: str | None) -> None:
    with prefer(preferred) if preferred else nullcontext():
        with pytest.raises(OpError, match="ops do not promote"):
            ops.rms_norm(torch.ones(2, 4), torch.ones(4).bfloat16())
        with pytest.raises(IndexError, match="out of range"):
            ops.embedding(torch.tensor([9]), torch.ones(4, 2))


def test_autocast_does_not_reach_into_ops() -> None:
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear(x, weight)
        (within,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (without,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == torch.float32
    assert torch.equal(within, without)


def test_the_preferred_provider_serves_the_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name, provider in ops.silu.providers.items():
        if provider.backward is None:  # `cpu` leaves it to the next
            continue

        def backward(*args: Any, name: str = name, wrapped: Any = provider.backward) -> Any:
            used.append(name)
            return wrapped(*args)

        monkeypatch.setitem(ops.silu.providers, name, replace(provider, backward=backward))
    x = torch.randn(2, 4, requires_grad=True)
    with prefer("reference"):
        y = ops.silu(x)
    y.sum().backward()
    ops.silu(x).sum().backward()
    assert used == ["reference", "aten"]


def test_a_backward_that_fails_leaves_no_preference_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a broken kernel")

    sound = ops.silu.providers["reference"]
    monkeypatch.setitem(ops.silu.providers, "reference", replace(sound, backward=fail))
    with prefer("reference"):
        y = ops.silu(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="a broken kernel"):
        y.sum().backward()
    assert ops.silu.select(torch.ones(1)).name != "reference"


def test_a_module_that_holds_an_op_can_be_copied_and_pickled() -> None:
    module = torch.nn.Module()
    module.__dict__["activation"] = ops.silu
    assert copy.deepcopy(module).activation is ops.silu
    assert pickle.loads(pickle.dumps(module)).activation is ops.silu


def test_inference_mode_works_after_training_and_before() -> None:
    x = torch.randn(2, 4)
    with torch.inference_mode():
        served = ops.rms_norm(x, torch.ones(4))
    trained = ops.rms_norm(x.requires_grad_(), torch.ones(4))
    assert torch.equal(served, trained)
    trained.sum().backward()


def test_a_graph_of_many_ops_compiles_with_inductor() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
        x, residual = ops.add_rms_norm(x, residual, norm)
        hidden = ops.gated_linear(x, weight, weight)
        return ops.softmax(ops.linear(hidden, weight, residual=residual).relu())

    inputs = [torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, 8), torch.ones(8)]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.clone().requires_grad_() for t in inputs]
    block(*ours).square().sum().backward()
    torch.compile(block, fullgraph=True)(*theirs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
