"""Gradients in C++: right at sizes around vectors and tiles, and of one bit pattern on any threads.

The records' tests (tests/ops/test_records.py) measure them on the samples, which are small. Here
sizes go beyond a block of 32 rows, a group of 256 columns and a slice of 3072 of k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.accuracy import backward_errors
from ingot.ops.arguments import as_tuple
from ingot.ops.inputs import TensorMaker
from ingot.ops.record import Op

KIND = "gradients"
pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Call:
    """Sizes and options of a call."""

    dtype: torch.dtype
    seed: int
    rows: int
    width: int
    out: int
    heads: tuple[int, int]
    """Key-value heads, and query heads that share one."""
    lengths: tuple[int, ...]
    window: int | None
    causal: bool
    bias: bool
    activation: ops.ActivationFn
    residual: bool
    strided: bool
    smooth: float
    rank: int
    """Of a LoRA adapter; 0 for none."""


def sizes(*near: int, most: int) -> st.SearchStrategy[int]:
    beside = [size + by for size in near for by in (-1, 0, 1)]
    return st.one_of(st.integers(1, 20), st.sampled_from(beside), st.integers(1, most))


calls = st.builds(
    Call,
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32 - 1),
    rows=sizes(16, 32, 64, 512, most=600),
    width=sizes(16, 32, 64, 256, most=300),
    out=sizes(16, 32, 64, 256, 512, most=600),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    lengths=st.lists(
        st.one_of(st.integers(0, 40), st.integers(1, 600)), min_size=1, max_size=3
    ).map(tuple),
    window=st.sampled_from([None, None, 1, 7, 100]),
    causal=st.sampled_from([True, True, False]),
    bias=st.booleans(),
    activation=st.sampled_from(ops.ActivationFn),
    residual=st.booleans(),
    strided=st.booleans(),
    smooth=st.sampled_from([0.0, 0.1]),
    rank=st.sampled_from([0, 1, 5, 16, 48, 300]),
)


def linear(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    weight = make(call.out, call.width, scale=call.width**-0.5)
    bias = make(call.out) if call.bias else None
    residual = make(call.rows, call.out) if call.residual else None
    x = make(call.rows, call.width)
    return x, weight, bias, int(call.activation), residual, *lora_term(make, call, 1)


def lora_term(make: TensorMaker, call: Call, parts: int) -> tuple[Any, ...]:
    """The adapter of a linear layer: h, the B of each weight, and no index."""
    if not call.rank:
        return None, *[None] * parts, None
    h = make(call.rows, parts * call.rank).float()
    bs = (make(1, call.rank, call.out, scale=call.rank**-0.5) for _ in range(parts))
    return h, *bs, None


def lora_shrink(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    a = make(1, max(call.rank, 1), call.width, scale=call.width**-0.5)
    return make(call.rows, call.width), a, torch.tensor([1.5]), None


def gated_linear(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    weights = make(2, call.out, call.width, scale=call.width**-0.5)
    x = make(call.rows, call.width)
    return x, *weights.unbind(0), int(call.activation), *lora_term(make, call, 2)


def norm(make: TensorMaker, call: Call, *, residual: bool, bias: bool) -> tuple[Any, ...]:
    between = (make(call.rows, call.width),) if residual else ()
    last = (make(call.width) if call.bias else None,) if bias else ()
    return make(call.rows, call.width), *between, make(call.width), *last, 1e-5


def loss(make: TensorMaker, call: Call, *, options: bool) -> tuple[Any, ...]:
    targets = make.ints(call.out, call.rows)
    weight = make(call.out, call.width, scale=call.width**-0.5)
    rest = (0, call.smooth, call.smooth * 1e-2) if options else ()
    return make(call.rows, call.width), weight, targets, *rest


def loss_of_logits(make: TensorMaker, call: Call, *, options: bool) -> tuple[Any, ...]:
    rest = (0, call.smooth, call.smooth * 1e-2) if options else ()
    return make(call.rows, call.out), make.ints(call.out, call.rows), *rest


def attention(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    kv_heads, group = call.heads
    total, width = sum(call.lengths), 1 + call.width % 80
    q, k, v = (make(total, n, width) for n in (kv_heads * group, kv_heads, kv_heads))
    cu_seqlens = torch.tensor([0, *torch.tensor(call.lengths).cumsum(0).tolist()])
    return q, k, v, cu_seqlens, None, None, call.causal, call.window, None


def embedding(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    return make.ints(call.out, call.rows), make(call.out, call.width)


def sampling(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    def cycle(*values: float) -> list[float]:
        return [values[row % len(values)] for row in range(call.rows)]

    # In rows of a few tokens the gradient cancels, and PyTorch's own error may be close to 0.
    width = call.out + 32
    top_k = make.tensor([int(k) for k in cycle(width, 5, width, width, 7)])
    temperature, top_p = cycle(1.0, 0.7, 1.3, 0.8, 0.0), cycle(1.0, 0.9, 0.8)
    options = [make.floats(values) for values in (temperature, top_p, cycle(0.0, 0.05))]
    return make(call.rows, width, scale=3.0), options[0], top_k, *options[1:]


def rope(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    width = 2 * (1 + call.width % 70)
    freqs, scale = ops.rope_frequencies(width)
    return make(call.rows, 3, width + call.out % 5), make.ints(5000, call.rows), freqs, False, scale


def gru_weights(make: TensorMaker, inputs: int, hidden: int, *members: int) -> tuple[Tensor, ...]:
    shapes = (3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return tuple(make(*members, *shape, scale=hidden**-0.5) for shape in shapes)


def gru_cell(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    inputs, hidden = 8 + call.width % 90, 8 + call.out % 90
    states = make(call.rows, inputs), make(call.rows, hidden)
    return *states, *gru_weights(make, inputs, hidden), call.bias


def gru(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    inputs, hidden = 8 + call.width % 40, 8 + call.out % 40
    lengths = [length % 50 for length in (*call.lengths, 3, 20)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    states = make(sum(lengths), inputs), make(len(lengths), hidden)
    return *states, starts, *gru_weights(make, inputs, hidden), call.bias


def gru_rollout(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    members, rows, steps = 1 + call.seed % 3, 1 + call.rows % 40, 1 + call.width % 10
    actions, hidden, outputs = call.out % 4, 8 + call.out % 40, 4 + call.width % 9
    return (
        make(members, rows, hidden),
        make(members, rows, outputs),
        make(members, rows, steps, actions),
        *gru_weights(make, outputs + actions, hidden, members),
        make(members, outputs, hidden, scale=hidden**-0.5),
        make(members, outputs),
        call.bias,
    )


def rssm_step(make: TensorMaker, call: Call) -> tuple[Any, ...]:
    shape = call.rows, 1 + call.out % 4, 8 + call.width % 60
    posterior = make(*shape) if call.bias else None
    return make(*shape), posterior, make.ints(99, call.rows), make.ints(99, call.rows), 0.01


ARGUMENTS: dict[str, Callable[[TensorMaker, Call], tuple[Any, ...]]] = {
    "linear": linear,
    "gated_linear": gated_linear,
    "lora_shrink": lora_shrink,
    "rms_norm": lambda make, call: norm(make, call, residual=False, bias=False),
    "layer_norm": lambda make, call: norm(make, call, residual=False, bias=True),
    "add_rms_norm": lambda make, call: norm(make, call, residual=True, bias=False),
    "add_layer_norm": lambda make, call: norm(make, call, residual=True, bias=True),
    "token_logprobs": lambda make, call: loss_of_logits(make, call, options=False),
    "cross_entropy": lambda make, call: loss_of_logits(make, call, options=True),
    "linear_token_logprobs": lambda make, call: loss(make, call, options=False),
    "linear_cross_entropy": lambda make, call: loss(make, call, options=True),
    "attention": attention,
    "embedding": embedding,
    "sampling_logprobs": sampling,
    "rope": rope,
    "gru_cell": gru_cell,
    "gru": gru,
    "gru_rollout": gru_rollout,
    "rssm_step": rssm_step,
}
OPS = [op for op in ops.registry().values() if op.name in ARGUMENTS]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def arguments(op: Op[..., Any], call: Call) -> tuple[Any, ...]:
    # Gradients that are GEMMs are MKL's in float32, whose bits depend on the threads.
    is_gemm = op.family in ("linear", "lora") or op.name.startswith("linear_")
    dtype = torch.bfloat16 if is_gemm else call.dtype
    args = ARGUMENTS[op.name](TensorMaker(dtype, seed=call.seed), call)
    return tuple(map(apart, args)) if call.strided else args


def apart(arg: Any) -> Any:
    """The same values, with gaps between them."""
    return torch.stack([arg, arg], -1)[..., 0] if isinstance(arg, Tensor) else arg


def gradients(op: Op[..., Any], args: tuple[Any, ...], threads: int) -> list[Tensor]:
    torch.set_num_threads(threads)
    needs = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
    outputs = as_tuple(op(*args))
    return op.backward_overload(needs, [torch.ones_like(out) for out in outputs], *args)


def test_every_gradient_in_cpp_is_tested_here() -> None:
    found = {op.name for op in ops.registry().values() if "cpu" in op.providers}
    own = {name for name in found if ops.registry()[name].providers["cpu"].backward}
    assert own | {"rope"} == set(ARGUMENTS)  # whose gradient is a call of itself


@each_op
def test_gradients_are_within_bound_at_any_size(op: Op[..., Any], explore: Any) -> None:
    def check(call: Call) -> None:
        errors = backward_errors(op, "cpu", arguments(op, call))
        assert max(errors.values()) <= 1, errors

    explore(calls, check, 12)


@each_op
def test_gradients_have_the_same_bits_on_any_threads(op: Op[..., Any], explore: Any) -> None:
    def check(call: Call) -> None:
        args = arguments(op, call)
        for one, two in zip(gradients(op, args, 1), gradients(op, args, 2), strict=True):
            assert torch.equal(one, two)

    explore(calls, check, 8)


@pytest.mark.parametrize("rows", [3071, 3073, 6200])
def test_many_rows_are_added_up_in_slices(rows: int) -> None:
    make = TensorMaker(torch.bfloat16)
    args = make(rows, 24), make(17, 24, scale=0.2), make(17)
    errors = backward_errors(ops.linear, "cpu", ops.linear.with_defaults(args))
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("words", [3071, 3073, 6200])
def test_many_words_become_gradients_some_at_a_time(words: int) -> None:
    make = TensorMaker(torch.bfloat16)
    targets = torch.tensor([0, words - 1, 3070, -100, 300])
    args = make(5, 24), make(words, 24, scale=0.2), targets, -100, 0.1, 1e-3
    errors = backward_errors(ops.linear_cross_entropy, "cpu", args)
    assert max(errors.values()) <= 1, errors


def test_large_vocabulary_is_computed_in_blocks_of_tokens() -> None:
    """Beyond 256 MB of logits the weight's gradient is added up in float32."""
    make, rows, words = TensorMaker(torch.bfloat16), 258, 530_000
    hidden, weight, targets = make(rows, 4), make(words, 4), make.ints(words, rows)
    grads = torch.ones(rows)
    kernel = ops.linear_token_logprobs.backward_overload

    def part(some: slice) -> list[Tensor]:
        return kernel([True, True, False], [grads[some]], hidden[some], weight, targets[some])

    whole, first, rest = part(slice(None)), part(slice(256)), part(slice(256, None))
    assert torch.equal(whole[0], torch.cat([first[0], rest[0]]))
    together = first[1].float() + rest[1].float()
    torch.testing.assert_close(whole[1].float(), together, rtol=0.02, atol=1e-6)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x, weight = torch.ones(3, 4).bfloat16(), torch.ones(5, 4).bfloat16()
    for shape in ((3, 4), (2, 5), (3, 5, 1)):
        grads = [torch.ones(shape, dtype=torch.bfloat16)]
        with pytest.raises(RuntimeError, match="must have the shape of the output"):
            ops.linear.backward_overload([True, True, *[False] * 6], grads, x, weight, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_subnormal_probabilities_are_zero_in_the_gradient_of_attention(dtype: torch.dtype) -> None:
    """With them it took up to 22 times as long: training slowed down as attention became sparse."""
    q, k, v = (torch.zeros(4, 1, 64, dtype=dtype) for _ in range(3))
    q[:, 0, 0], k[3, 0, 0] = 1.0, -87.0  # the last key has a probability of 2^-127
    v.requires_grad_()
    out = ops.attention(q, k, v, torch.tensor([0, 4]), causal=False, scale=1.0)
    out.backward(torch.full_like(out, 2.0**30))
    assert v.grad is not None
    assert torch.equal(v.grad[3], torch.zeros(1, 64, dtype=dtype))
    torch.testing.assert_close(v.grad[:3], torch.full((3, 1, 64), 2.0**32 / 3).to(dtype))


# What ranks compute that divide a layer, see `ingot.parallel.tensor`: some output features, and the
# gradient of some input features. They are bitwise those of the whole layer.


def assert_linear_divides(call: Call) -> None:
    call = replace(call, dtype=torch.bfloat16, rank=0, residual=True)
    make = TensorMaker(call.dtype, seed=call.seed)
    x, weight, bias, activation, residual, *_ = linear(make, call)
    assert residual is not None
    y, grad = ops.linear(x, weight, bias, activation, residual), make(call.rows, call.out)
    args = x, weight, bias, activation, residual
    of_x, of_weight, *of_bias = layer_gradients(ops.linear, grad, args, bias is not None)
    cut = call.seed % (call.out + 1)
    parts: list[Tensor] = []
    for own in (slice(cut), slice(cut, None)):
        part = x, weight[own], bias if bias is None else bias[own], activation, residual[:, own]
        assert torch.equal(ops.linear(*part), y[:, own])
        parts.append(ops.linear_preact_grad(grad[:, own], *part[:4]))
        grads = layer_gradients(ops.linear, grad[:, own], part, bias is not None)
        for wanted, found in zip((of_weight, *of_bias), grads[1:], strict=True):
            assert torch.equal(wanted[own], found)
    dz = torch.cat(parts, 1)
    column = call.seed % (call.width + 1)
    for own in (slice(column), slice(column, None)):
        found = layer_gradients(ops.linear, dz, (x[:, own], weight[:, own], None), False)
        assert torch.equal(found[0], of_x[:, own])


def assert_gated_linear_divides(call: Call) -> None:
    call = replace(call, dtype=torch.bfloat16, rank=0)
    make = TensorMaker(call.dtype, seed=call.seed)
    x, gate, up, activation, *_ = gated_linear(make, call)
    y, grad = ops.gated_linear(x, gate, up, activation), make(call.rows, call.out)
    of_x, *of_weights = layer_gradients(ops.gated_linear, grad, (x, gate, up, activation), True)
    cut = call.seed % (call.out + 1)
    dz: list[tuple[Tensor, Tensor]] = []
    for own in (slice(cut), slice(cut, None)):
        weights = gate[own], up[own]
        assert torch.equal(ops.gated_linear(x, *weights, activation), y[:, own])
        dz.append(ops.gated_linear_preact_grad(grad[:, own], x, *weights, activation))
        for wanted, own_dz, weight in zip(of_weights, dz[-1], weights, strict=True):
            _, found = layer_gradients(ops.linear, own_dz, (x, weight, None), False)
            assert torch.equal(wanted[own], found)
    of_gate, of_up = (torch.cat(parts, 1) for parts in zip(*dz, strict=True))
    column = call.seed % (call.width + 1)
    for own in (slice(column), slice(column, None)):
        found = ops.gated_linear_input_grad(of_gate, of_up, gate[:, own], up[:, own])
        assert torch.equal(found, of_x[:, own])


def assert_attention_divides(call: Call) -> None:
    call = replace(call, dtype=torch.bfloat16, heads=(4, call.heads[1]))
    args = attention(TensorMaker(call.dtype, seed=call.seed), call)
    y, whole = ops.attention(*args), gradients(ops.attention, args, 2)
    for rank in range(2):
        heads = [tensor.chunk(2, 1)[rank] for tensor in args[:3]]
        assert torch.equal(ops.attention(*heads, *args[3:]), y.chunk(2, 1)[rank])
        found = gradients(ops.attention, (*heads, *args[3:]), 2)
        for wanted, grad in zip(whole, found, strict=True):
            assert torch.equal(wanted.chunk(2, 1)[rank], grad)


def layer_gradients(
    op: Op[..., Any], grad: Tensor, args: tuple[Any, ...], third: bool
) -> list[Tensor]:
    """The gradients of the first two arguments of a layer, or of three."""
    args = op.with_defaults(args)
    needs = [True, True, third, *(False for _ in args[3:])]
    return op.backward_overload(needs, [grad.contiguous()], *args)


DIVISIONS = [assert_linear_divides, assert_gated_linear_divides, assert_attention_divides]


@pytest.mark.parametrize("check", DIVISIONS)
def test_parts_of_a_layer_do_not_depend_on_the_rest(check: Any, explore: Any) -> None:
    explore(calls, check, 12)


@pytest.mark.slow
@pytest.mark.parametrize("check", DIVISIONS)
def test_parts_of_many_layers_do_not_depend_on_the_rest(check: Any, explore: Any) -> None:
    explore(calls, check, 150)


@pytest.mark.parametrize("out", [3071, 3073, 6200])
@pytest.mark.parametrize("check", DIVISIONS[:2])
def test_parts_of_a_wide_layer_do_not_depend_on_the_rest(check: Any, out: int) -> None:
    options = {"heads": (1, 1), "lengths": (1,), "window": None, "causal": True, "rank": 0}
    options |= {"bias": True, "residual": True, "strided": False, "smooth": 0.0}
    check(
        Call(
            dtype=torch.bfloat16,
            seed=1023,
            rows=45,
            width=70,
            out=out,
            activation=ops.ActivationFn.SILU,
            **options,
        )
    )
