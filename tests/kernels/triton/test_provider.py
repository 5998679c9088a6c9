"""Dispatch to GPU kernels, with a GPU that is pretended or traced."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot import ops
from ingot.kernels import triton as package
from ingot.kernels.triton.provider import provided, takes


def test_without_a_gpu_nobody_imports_triton() -> None:
    code = (
        "import sys, torch\nfrom ingot import ops\nops.silu(torch.zeros(2, 4))\n"
        "assert 'triton' not in ops.silu.providers\nassert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_there_is_a_gpu_its_kernels_come_before_aten() -> None:
    code = (
        "import torch\ntorch.cuda.is_available = lambda: True\nfrom ingot import ops\n"
        "for op in ops.catalogue().values():\n"
        "    names = list(op.providers)\n"
        "    assert 'triton' in names, op\n"
        "    assert 'aten' not in names or names.index('triton') < names.index('aten'), op\n"
        "assert ops.silu.select(torch.zeros(2, 4)).name in ('cpu', 'aten')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gpu_without_triton_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    package.available.cache_clear()
    assert not package.available()
    package.available.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "taken"),
    [
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float32, True),
        (torch.float64, False),
        (torch.float8_e4m3fn, False),
    ],
)
def test_which_tensors_the_kernels_take(dtype: torch.dtype, taken: bool) -> None:
    with FakeTensorMode():
        here = torch.empty(4, 8, dtype=dtype, device="cuda")
        tokens = torch.empty(4, dtype=torch.int64, device="cuda")
        assert takes((here, tokens, 1.0, None)) is taken
        assert not takes((torch.empty(4, 8, dtype=dtype),))
        assert not takes((here, torch.empty(4, dtype=torch.int64)))


def test_the_interpreter_does_not_take_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert takes((torch.zeros(1, dtype=torch.float16),))
    assert not takes((torch.zeros(1, dtype=torch.bfloat16),))


@pytest.mark.parametrize("name", sorted(provided()))
def test_what_kernels_allocate_is_what_the_fake_says(name: str) -> None:
    """On tensors without memory, where no kernel runs: shapes, dtypes, strides."""
    from ingot.kernels.triton.kernel import recording
    from ingot.kernels.triton.provider import Meta
    from ingot.ops.gradient import as_tuple

    one = provided()[name]
    args = one.op.complete(one.example(Meta()))
    with recording():
        real = as_tuple(one.forward(*args))
        for result, fake in zip(real, as_tuple(one.op.fake(*args)), strict=True):
            assert (result.shape, result.dtype, result.stride()) == (
                *(fake.shape, fake.dtype, fake.stride()),
            )
        if one.backward:
            needs = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
            needs = [need and i == 0 for i, need in enumerate(needs)]
            grads = [torch.empty_like(out) for out in as_tuple(one.op.fake(*args))]
            (first, *_) = one.backward(needs, grads, *args)
            if needs[0]:
                assert first is not None
                assert (first.shape, first.dtype) == (args[0].shape, args[0].dtype)


def test_a_gpt2_block_on_a_gpu_is_traced_without_breaks() -> None:
    """Forward and backward on tensors that pretend to be on a GPU, through every op of the block."""
    dim, heads, width = 64, 4, 16
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def keep(inner: torch.fx.GraphModule, _: list[Any]) -> Any:
            for node in inner.graph.nodes:
                if node.op == "call_function":
                    seen.append(str(node.target))
            return inner.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    def block(x: Tensor, p: dict[str, Tensor], starts: Tensor, targets: Tensor) -> Tensor:
        h = ops.layer_norm(x, p["norm"], p["shift"], 1e-5)
        q, k, v = ops.linear(h, p["qkv"], p["qkv_bias"]).view(-1, 3, heads, width).unbind(1)
        h = ops.attention(q, k, v, starts).flatten(1)
        h, x = ops.add_layer_norm(ops.linear(h, p["out"]), x, p["norm"], p["shift"], 1e-5)
        h = ops.linear_gelu_tanh(h, p["up"], p["up_bias"])
        x = ops.linear_residual(h, p["down"], x)
        return ops.linear_cross_entropy(x, p["head"], targets).mean()

    shapes = {
        "norm": (dim,), "shift": (dim,), "qkv": (3 * dim, dim), "qkv_bias": (3 * dim,),
        "out": (dim, dim), "up": (4 * dim, dim), "up_bias": (4 * dim,), "down": (dim, 4 * dim),
        "head": (100, dim),
    }  # fmt: skip
    torch.compiler.reset()
    with FakeTensorMode():
        p = {
            name: torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for name, shape in shapes.items()
        }
        x = torch.empty(12, dim, device="cuda", dtype=torch.bfloat16)
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        targets = torch.empty(12, dtype=torch.int64, device="cuda")
        loss = torch.compile(block, fullgraph=True, backend=backend)(x, p, starts, targets)
        assert loss.device.type == "cuda"
        loss.backward()
        assert all(t.grad is not None for t in p.values())
    for name in ("layer_norm", "linear", "attention", "linear_gelu_tanh", "linear_cross_entropy"):
        assert f"ingot.{name}.default" in seen
        assert f"ingot.{name}_backward.default" in seen
