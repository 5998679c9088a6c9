from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import OpError
from ingot.ops.inputs import TensorMaker

needs_compiler = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
both_resets = pytest.mark.parametrize("reset_after", [True, False])


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def weights(make: TensorMaker, inputs: int, hidden: int, *members: int) -> Any:
    shapes = (3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return tuple(make(*members, *shape, scale=hidden**-0.5) for shape in shapes)


def rollout_args(
    make: TensorMaker,
    *,
    members: int,
    rows: int,
    steps: int,
    hidden: int,
    actions: int = 3,
    outputs: int = 2,
) -> Any:
    return (
        make(members, rows, hidden),
        make(members, rows, outputs),
        make(members, rows, steps, actions),
        *weights(make, outputs + actions, hidden, members),
        make(members, outputs, hidden, scale=hidden**-0.5),
        make(members, outputs),
    )


def test_cell_equals_torch() -> None:
    torch.manual_seed(0)
    cell, x, h = nn.GRUCell(5, 7), torch.randn(4, 5), torch.randn(4, 7)
    expected = cell(x, h)
    expected.sum().backward()
    parameters: list[Any] = [p.detach().requires_grad_() for p in cell.parameters()]
    actual = ops.gru_cell(x, h, *parameters)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    for ours, theirs in zip(parameters, cell.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_sequences_equal_torch() -> None:
    torch.manual_seed(0)
    model, lengths = nn.GRU(5, 7), [3, 1, 6]
    x, h = torch.randn(10, 5), torch.randn(3, 7)
    parts = zip(x.split(lengths), h, strict=True)
    expected = torch.cat([model(part, state[None])[0] for part, state in parts])
    given: Any = list(model.parameters())
    actual = ops.gru(x, h, torch.tensor([0, 3, 4, 10]), *given)
    torch.testing.assert_close(actual, expected)


def test_reset_before_the_product_is_the_papers() -> None:
    """With an identity for W_hn and nothing else, n is tanh(r * h) or tanh(r * h + r * b_hn)."""
    h, eye = torch.tensor([[0.5, -0.5]]), torch.eye(2)
    w_hh = torch.cat([torch.zeros(4, 2), eye])
    b_hh = torch.tensor([0.0, 0.0, -100.0, -100.0, 0.2, 0.2])  # z is 0, r a half
    given = torch.zeros(1, 1), h, torch.zeros(6, 1), w_hh, torch.zeros(6), b_hh
    torch.testing.assert_close(ops.gru_cell(*given), torch.tanh(0.5 * (h + 0.2)))
    torch.testing.assert_close(ops.gru_cell(*given, reset_after=False), torch.tanh(0.5 * h + 0.2))


@both_resets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence_is_bitwise_a_loop_of_cells(dtype: torch.dtype, reset_after: bool) -> None:
    make = TensorMaker(dtype)
    x, h, given = make(9, 12), make(1, 21), weights(make, 12, 21)
    out = ops.gru(x, h, torch.tensor([0, 9]), *given, reset_after=reset_after)
    for token in range(9):
        h = ops.gru_cell(x[token : token + 1], h, *given, reset_after=reset_after)
        assert torch.equal(out[token : token + 1], h)


@both_resets
@needs_compiler
def test_rollout_is_bitwise_a_loop_of_cells_and_heads(reset_after: bool) -> None:
    args = rollout_args(TensorMaker(torch.float32), members=2, rows=3, steps=7, hidden=40)
    outputs, last = ops.gru_rollout(*args, reset_after=reset_after)
    for member in range(2):
        h, y, actions, *given, w_out, b_out = (arg[member] for arg in args)
        for step in range(7):
            x = torch.cat([y, actions[:, step]], 1)
            h = ops.gru_cell(x, h, *given, reset_after=reset_after)
            y = ops.linear(h, w_out, b_out)
            assert torch.equal(outputs[member, :, step], y)
        assert torch.equal(last[member], h)


@both_resets
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (2, 7), (5, 33), (70, 20)])
def test_member_and_row_do_not_depend_on_the_rest(
    rows: int, hidden: int, dtype: torch.dtype, reset_after: bool
) -> None:
    args = rollout_args(TensorMaker(dtype), members=4, rows=rows, steps=6, hidden=hidden)
    assert ops.gru_rollout.select(*args, reset_after).name == "cpu"
    torch.set_num_threads(2)
    whole = ops.gru_rollout(*args, reset_after=reset_after)
    torch.set_num_threads(1)
    for member in (0, 3):
        alone = ops.gru_rollout(
            *(arg[member : member + 1] for arg in args), reset_after=reset_after
        )
        for one, other in zip(alone, whole, strict=True):
            assert torch.equal(one[0], other[member])
    for row in (0, rows - 1):
        states = [arg[:, row : row + 1] for arg in args[:3]]
        for one, other in zip(
            ops.gru_rollout(*states, *args[3:], reset_after=reset_after), whole, strict=True
        ):
            assert torch.equal(one[:, 0], other[:, row])


@needs_compiler
def test_gradient_of_a_member_does_not_depend_on_the_ensemble() -> None:
    args = rollout_args(TensorMaker(torch.float32), members=3, rows=4, steps=5, hidden=24)

    def gradients(some: slice) -> tuple[Tensor, ...]:
        leaves = [arg[some].clone().requires_grad_() for arg in args]
        outputs, h = ops.gru_rollout(*leaves)
        return torch.autograd.grad(outputs.square().sum() + h.sum(), leaves)

    whole = gradients(slice(None))
    for one, other in zip(gradients(slice(1, 2)), whole, strict=True):
        assert torch.equal(one, other[1:2])


@both_resets
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence_does_not_depend_on_the_others(dtype: torch.dtype, reset_after: bool) -> None:
    make, lengths = TensorMaker(dtype), [5, 0, 40, 1, 40, 13]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    x, h, given = make(99, 30), make(6, 50), weights(make, 30, 50)
    torch.set_num_threads(2)
    whole = ops.gru(x, h, starts, *given, reset_after=reset_after)
    torch.set_num_threads(1)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        own = slice(start, start + length)
        alone = ops.gru(
            x[own], h[i : i + 1], torch.tensor([0, length]), *given, reset_after=reset_after
        )
        assert torch.equal(alone, whole[own])


def test_no_tokens() -> None:
    make = TensorMaker(torch.float32)
    for provider in ("cpu", "reference"):
        with ops.prefer(provider):
            out = ops.gru(make(0, 3), make(2, 4), torch.zeros(3).long(), *weights(make, 3, 4))
        assert out.shape == (0, 4)


def test_rollout_learns_through_its_own_outputs() -> None:
    """The gradient of the last output reaches the first input only through those between."""
    args = rollout_args(TensorMaker(torch.float32), members=2, rows=1, steps=4, hidden=8)
    y = args[1].requires_grad_()
    outputs, _ = ops.gru_rollout(*args)
    (grad,) = torch.autograd.grad(outputs[:, :, -1].sum(), y)
    assert (grad != 0).all()


@needs_compiler
@pytest.mark.parametrize("starts", [[0, 3], [0, 3, 2], [1, 3, 5], [0, 6, 5]])
def test_sequences_that_do_not_fit_are_an_error(starts: list[int]) -> None:
    make = TensorMaker(torch.float32)
    with pytest.raises((OpError, RuntimeError), match="cu_seqlens"):
        ops.gru(make(5, 3), make(2, 4), torch.tensor(starts), *weights(make, 3, 4))


def test_wrong_shapes_are_errors_that_name_the_argument() -> None:
    make = TensorMaker(torch.float32)
    given = weights(make, 3, 4)
    with pytest.raises(OpError, match=r"gru_cell: x is \(2, 3\), h \(3, 4\)"):
        ops.gru_cell(make(2, 3), make(3, 4), *given)
    with pytest.raises(OpError, match="w_ih, w_hh"):
        ops.gru_cell(make(2, 5), make(2, 4), *given)
    args = list(rollout_args(make, members=2, rows=1, steps=3, hidden=8))
    with pytest.raises(OpError, match="w_out"):
        ops.gru_rollout(*args[:7], w_out=args[7][:1], b_out=args[8])
    args[2] = args[2][:, :, :0]
    with pytest.raises(OpError, match="at least one step"):
        ops.gru_rollout(*args)
    noise = make.ints(9, 2), make.ints(9, 2)
    with pytest.raises(OpError, match="unimix"):
        ops.rssm_step(make(2, 3, 4), None, *noise, unimix=0.0)
    with pytest.raises(OpError, match="seed"):
        ops.rssm_step(make(2, 3, 4), None, noise[0][:1], noise[1])


def test_compiles_without_a_graph_break() -> None:
    make = TensorMaker(torch.float32)
    x, h, starts, given = make(5, 3), make(2, 4), torch.tensor([0, 2, 5]), weights(make, 3, 4)
    compiled = torch.compile(ops.gru, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, h, starts, *given), ops.gru(x, h, starts, *given))


# ---- rssm_step


def test_log_probabilities_are_those_of_the_mixture() -> None:
    make = TensorMaker(torch.float32)
    prior, posterior = make(5, 3, 8), make(5, 3, 8, scale=30.0)
    sample, *logs = ops.rssm_step(prior, posterior, make.ints(99, 5), make.ints(99, 5), 0.04)
    for logits, found in zip((prior, posterior), logs, strict=True):
        torch.testing.assert_close(found, (0.96 * logits.softmax(-1) + 0.04 / 8).log())
        assert found.min() >= torch.tensor(0.04 / 8).log() - 1e-5
    assert torch.equal(sample.sum(-1), torch.ones(5, 3))
    assert torch.equal(sample.amax(-1), torch.ones(5, 3))


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_samples_have_their_probabilities(provider: str) -> None:
    rows = 20_000
    p = torch.tensor([[0.7, 0.1, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    seeds = torch.full((rows,), 3)
    with ops.prefer(provider):
        sample, _, logs = ops.rssm_step(
            p.log().expand(rows, 2, 4), None, seeds, torch.arange(rows), 0.01
        )
    # Five standard deviations of a share.
    assert (sample.mean(0) - logs[0].exp()).abs().max() < 5 * 0.5 / rows**0.5
    first, second = sample.argmax(-1).unbind(1)
    joint = ((first == 0) & (second == 0)).float().mean()  # groups are independent
    assert abs(float(joint) - 0.7 * 0.25) < 5 * 0.5 / rows**0.5


def test_providers_draw_the_same_categories() -> None:
    make = TensorMaker(torch.float32)
    args = make(500, 4, 32), make(500, 4, 32), make.ints(1 << 62, 500), make.ints(1 << 40, 500)
    sampled: list[Tensor] = []
    for provider in ("cpu", "reference"):
        with ops.prefer(provider):
            sampled.append(ops.rssm_step(*args)[0])
    assert torch.equal(*sampled)


def test_a_sample_is_a_function_of_seed_and_position() -> None:
    logits = torch.zeros(64, 8, 32)
    seeds, positions = torch.arange(64), torch.full((64,), 5)
    one = ops.rssm_step(logits, None, seeds, positions)[0]
    assert torch.equal(one, ops.rssm_step(logits, None, seeds, positions)[0])
    assert not torch.equal(one, ops.rssm_step(logits, None, seeds, positions + 1)[0])
    assert not torch.equal(one, ops.rssm_step(logits, None, seeds + 1, positions)[0])
    assert not torch.equal(one[:, 0], one[:, 1])


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_gradient_of_a_sample_is_that_of_its_probabilities(provider: str) -> None:
    make = TensorMaker(torch.float32)
    prior, posterior, weight = make(4, 3, 8), make(4, 3, 8), make(4, 3, 8)
    noise = make.ints(99, 4), make.ints(99, 4)
    posterior.requires_grad_()
    with ops.prefer(provider):
        sample, *_ = ops.rssm_step(prior, posterior, *noise)
        (actual,) = torch.autograd.grad((sample * weight).sum(), posterior)
    p = 0.99 * posterior.softmax(-1) + 0.01 / 8
    (expected,) = torch.autograd.grad((p * weight).sum(), posterior)
    torch.testing.assert_close(actual, expected)
