"""Dispatch to GPU kernels, with a mocked GPU or by tracing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot import ops
from ingot.kernels import triton as package
from ingot.kernels.triton import config_store
from ingot.kernels.triton.launch import record_launches
from ingot.kernels.triton.provider import ExampleInputs, accepts, triton_ops
from ingot.nn.attention import Rotary
from ingot.nn.decoder import Decoder
from ingot.nn.layout import BatchLayout
from ingot.nn.presets import preset
from ingot.ops.accuracy import backward_errors, forward_errors
from ingot.ops.arguments import as_tuple, map_tensors, tensors
from ingot.ops.inputs import TensorMaker


def test_triton_is_not_imported_without_a_gpu() -> None:
    code = (
        "import sys, torch\nfrom ingot import ops\nops.silu(torch.zeros(2, 4))\n"
        "assert 'triton' not in ops.silu.providers\nassert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MOCKED_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda index: (9, 0)
from ingot.kernels.triton import config_store
config_store.device_arch = lambda: "sm_90"
from torch._subclasses.fake_tensor import FakeTensorMode
from ingot import ops

def make(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def name(op, *args):
    return op.select(*args).name

with FakeTensorMode():
    starts, blocks = make(3, dtype=torch.int32), make(2, 4, dtype=torch.int32)
    q, k = make(12, 4, 64), make(12, 2, 64)
    pool, lengths = make(8, 16, 2, 64), make(2, dtype=torch.int32)
"""


SELECTIONS = (
    "name(ops.attention, q, k, k, starts) == 'aten'",
    "name(ops.attention, q, k, k, starts, None, None, True, 5) == 'aten'",
    "name(ops.attention, q.float(), k.float(), k.float(), starts) == 'triton'",
    "name(ops.attention, make(12, 4, 12), make(12, 2, 12), make(12, 2, 12), starts) == 'triton'",
    "name(ops.attention, q, k, k, starts, lengths) == 'triton'",
    "name(ops.attention, q, pool, pool, starts, lengths, blocks) == 'triton'",
    "name(ops.grouped_linear, make(12, 64), make(3, 48, 64), make(4)) == 'aten'",
    "name(ops.grouped_linear, make(12, 64), make(3, 47, 64), make(4)) == 'triton'",
    "name(ops.grouped_linear, make(12, 60), make(3, 48, 60), make(4)) == 'triton'",
    "name(ops.grouped_gated_linear, make(8, 64), *[make(3, 48, 64)] * 2, make(4)) == 'aten'",
    "name(ops.linear, make(12, 64), make(48, 64)) == 'triton'",
    "name(ops.linear_int8_dynamic, make(64, 64), make(8, 64), make(8)) == 'triton'",
    "name(ops.adamw, *[[make(4, dtype=torch.float32)]] * 4, [], 1, 0.1) == 'triton'",
)


PRIORITY = """
        WITHOUT_KERNELS = (
            'lora_shrink', 'linear_int4_dynamic', 'embedding_int4', 'embedding_int8',
            'square_sum', 'linear_preact_grad', 'gated_linear_preact_grad',
            'gated_linear_input_grad', 'padded_attention'
        )
        for op in ops.registry().values():
            names = list(op.providers)
            if op.name in WITHOUT_KERNELS:
                continue
            assert 'triton' in names, op
            assert 'aten' not in names or names.index('triton') < names.index('aten'), op
        assert ops.silu.select(torch.empty(2, 4, device="cpu")).name in ('cpu', 'aten')
"""


def test_triton_has_priority_over_aten_except_where_aten_is_preferred() -> None:
    """The device is mocked and the tensors are fake, so nothing runs."""
    invariant = [fact.replace("'aten'", "'triton'") for fact in SELECTIONS]

    def assertions(facts: Sequence[str]) -> str:
        return "".join(f"        assert {fact}\n" for fact in facts)

    code = (
        f"{MOCKED_GPU}    if True:\n{assertions(SELECTIONS)}{PRIORITY}"
        f"    with ops.batch_invariant():\n{assertions(invariant)}"
        f"    with torch.inference_mode():\n{assertions(invariant)}"
        f"    with ops.prefer('triton'):\n{assertions(invariant)}"
        "    torch.cuda.get_device_capability = lambda index: (7, 5)\n"
        "    from ingot.kernels import aten\n"
        f"    aten.capable.cache_clear()\n    if True:\n{assertions(invariant)}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def varlen_attn_reference(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int,
    longest_k: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Compute what PyTorch documents for `varlen_attn`, which needs a GPU. A window (left, right)
    is the number of keys that are visible on each side of the query, -1 for all."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert enable_gqa
    assert max(starts_q.diff()) <= longest_q
    assert max(starts_k.diff()) <= longest_k
    left, right = (10**6 if side < 0 else side for side in window_size)
    outputs = []
    for a, b in pairwise(starts_q.tolist()):
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)
        seen = (distance <= left) & (-distance <= right)
        turned = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *turned, attn_mask=seen, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_is_called_with_the_semantics_of_the_op(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import varlen

    from ingot.kernels.aten import attention

    assert "aten" in ops.attention.providers  # imported, so that its attributes can be patched
    calls: list[str] = []

    def called(*args: Any, **options: Any) -> Tensor:
        calls.append(sample.name)
        return varlen_attn_reference(*args, **options)

    monkeypatch.setattr(attention, "on_gpu", lambda q: True)
    monkeypatch.setattr(varlen, "varlen_attn", called)
    for sample in ops.attention.samples(TensorMaker(dtype)):
        args = ops.attention.with_defaults(sample.args)
        assert max(forward_errors(ops.attention, "aten", args)) <= 1, sample.name
        assert max(backward_errors(ops.attention, "aten", args).values()) <= 1, sample.name
    windows = {"typical", "not_causal", "window", "window_not_causal", "strided"}
    assert set(calls) == windows | {"empty_sequence", "extreme"}


def test_provider_is_unavailable_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_supported_dtypes_and_devices(
    dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_store, "device_arch", lambda: "sm_90")
    with FakeTensorMode():
        here = torch.empty(4, 8, dtype=dtype, device="cuda")
        tokens = torch.empty(4, dtype=torch.int64, device="cuda")
        assert accepts((here, tokens, 1.0, None)) is taken
        assert not accepts((torch.empty(4, 8, dtype=dtype),))
        assert not accepts((here, torch.empty(4, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("capability", "taken"), [("sm_75", False), ("sm_80", True), ("gfx942", True), ("gfx90a", True)]
)
def test_gpu_older_than_sm_80_is_not_supported(
    capability: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_store, "device_arch", lambda: capability)
    with FakeTensorMode():
        assert accepts((torch.empty(4, 8, device="cuda"),)) is taken


def test_interpreter_does_not_support_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert accepts((torch.zeros(1, dtype=torch.float16),))
    assert not accepts((torch.zeros(1, dtype=torch.bfloat16),))


@pytest.mark.parametrize("name", sorted(triton_ops()))
def test_outputs_match_the_fake_implementation(name: str) -> None:
    """Compare shapes, dtypes and strides on meta tensors; no kernel runs."""
    one = triton_ops()[name]
    args = one.op.with_defaults(one.example(ExampleInputs()))
    with record_launches():
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


@pytest.mark.parametrize("name", sorted(triton_ops()))
def test_examples_are_on_the_requested_device(name: str) -> None:
    one = triton_ops()[name]
    for args in one.calls("forward", ExampleInputs()):
        assert {tensor.device.type for tensor in tensors(args)} == {"meta"}


GPT2 = {
    "norm": (64,), "shift": (64,), "qkv": (192, 64), "qkv_bias": (192,), "out": (64, 64),
    "up": (256, 64), "up_bias": (256,), "down": (64, 256), "head": (100, 64),
}  # fmt: skip


def block(x: Tensor, p: dict[str, Tensor], starts: Tensor, targets: Tensor) -> Tensor:
    """Compute a block of GPT-2 and its loss."""
    h = ops.layer_norm(x, p["norm"], p["shift"], 1e-5)
    q, k, v = ops.linear(h, p["qkv"], p["qkv_bias"]).view(-1, 3, 4, 16).unbind(1)
    h = ops.linear(ops.attention(q, k, v, starts).flatten(1), p["out"])
    h, x = ops.add_layer_norm(h, x, p["norm"], p["shift"], 1e-5)
    h = ops.linear(h, p["up"], p["up_bias"], ops.ActivationFn.GELU_TANH)
    x = ops.linear(h, p["down"], residual=x)
    return ops.linear_cross_entropy(x, p["head"], targets)


def recording_backend(seen: list[str]) -> Any:
    """Return a compiler backend that records the targets of its graphs."""
    from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def trace_block(device: str, requires_grad: bool) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Compile the block as one graph on tensors without memory; return its loss, its parameters
    and the ops in the graphs."""
    seen: list[str] = []
    p = {
        name: torch.empty(shape, device=device, requires_grad=requires_grad)
        for name, shape in GPT2.items()
    }
    tokens = torch.empty(12, dtype=torch.int64, device=device)
    starts = torch.empty(3, dtype=torch.int32, device=device)
    x = torch.empty(12, 64, device=device)
    loss = torch.compile(block, fullgraph=True, backend=recording_backend(seen))(
        x, p, starts, tokens
    )
    return loss, p, seen


def test_gpt2_block_on_a_gpu_is_traced_without_graph_breaks() -> None:
    with FakeTensorMode(), torch.no_grad():
        loss, _, seen = trace_block("cuda", requires_grad=False)
        assert loss.device.type == "cuda"
    names = ["layer_norm", "linear", "attention", "linear_cross_entropy"]
    assert {f"ingot.{name}.default" for name in names} <= set(seen)


def test_gpt2_block_backward_is_traced_without_graph_breaks() -> None:
    """On meta tensors: without CUDA, torch aborts when autograd queries the device's streams."""
    loss, p, seen = trace_block("meta", requires_grad=True)
    loss.sum().backward()
    assert all(parameter.grad is not None for parameter in p.values())
    names = ["layer_norm", "linear", "attention", "linear_cross_entropy"]
    assert {f"ingot.{name}_backward.default" for name in names} <= set(seen)


LLAMA = {"embedding": 1, "rms_norm": 5, "linear": 2, "rope": 4, "attention": 2}
MODELS = {
    "gpt2-124m": {
        **{"embedding": 2, "layer_norm": 5, "linear": 8, "attention": 2},
    },
    "smollm2-135m": {**LLAMA, "linear": 6, "gated_linear": 2},
    "tiny-moe": {
        **LLAMA,
        **{"linear": 6, "softmax": 2},
        **{"grouped_gated_linear": 2, "grouped_linear": 2},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_traced_without_graph_breaks(name: str) -> None:
    """On meta tensors: slicing a fake CUDA tensor needs a torch built with CUDA."""
    decoder = Decoder.on_meta(replace(preset(name), layers=2))
    for module in decoder.modules():
        if isinstance(module, Rotary):  # its frequencies are real, whatever the weights are
            module.freqs = module.freqs.to("meta")
    tokens = torch.empty(12, dtype=torch.int64, device="meta")
    layout = BatchLayout(
        cu_seqlens=torch.empty(3, dtype=torch.int32, device="meta"), positions=tokens
    )
    seen: list[str] = []
    compiled = torch.compile(decoder, fullgraph=True, backend=recording_backend(seen))
    hidden = compiled(tokens, layout)
    hidden.sum().backward()
    counts = Counter(name.split(".")[1] for name in seen if name.startswith("ingot."))
    backward = {f"{op}_backward": count for op, count in MODELS[name].items()}
    assert counts == {**MODELS[name], **backward}
    unused = {n for n, p in decoder.named_parameters() if p.grad is None}
    assert unused <= {"lm_head.weight"}


def as_cuda_tensor(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty(arg.shape, dtype=arg.dtype, device="cuda")


@pytest.mark.parametrize("name", sorted(triton_ops()))
def test_every_op_has_a_fake_implementation_on_a_gpu(name: str) -> None:
    one = triton_ops()[name]
    with FakeTensorMode(), torch.no_grad():
        args = tuple(
            map_tensors(as_cuda_tensor, arg)
            for arg in one.op.with_defaults(one.example(ExampleInputs()))
        )
        outputs = as_tuple(one.op(*args))
        assert all(out.device.type == "cuda" for out in outputs)
        if one.op.gradient:
            needs = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
            grads = one.op.backward_overload(needs, list(outputs), *args)
            wanted = [arg for arg, needed in zip(args, needs, strict=True) if needed]
            assert [g.shape for g in grads] == [arg.shape for arg in wanted]
            assert all(g.device.type == "cuda" for g in grads)
