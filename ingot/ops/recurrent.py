"""Gated recurrent units (Cho et al. 2014) and the latent step of a recurrent state-space model.

    r, z = sigmoid(W_ir x + b_ir + W_hr h + b_hr), sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n    = tanh(W_in x + b_in + r * (W_hn h + b_hn))
    h'   = (1 - z) * n + z * h

as in PyTorch and cuDNN: `w_ih` (3H, I) and `w_hh` (3H, H) have the rows of r, z and n, in this
order. With `reset_after=False` the reset gate is applied before the product, as in the paper:
n = tanh(W_in x + b_in + W_hn (r * h) + b_hn).

    gru_cell      one step of each row
    gru           packed sequences: `cu_seqlens` (N+1) holds the start of each
    gru_rollout   an ensemble of models, each with its own weights, that feed their outputs back for
                  many steps, in one call
    rssm_step     categorical latents (Hafner et al. 2023): log-probabilities and a sample

The state between two steps is rounded to the dtype of the arguments, so `gru` computes what a loop
of `gru_cell` computes. A member of an ensemble has the same bits in every ensemble, and alone.

Legend: T rows or tokens, N sequences, I inputs, H hidden channels, E members of an ensemble, B rows
of each member, S steps, A actions, O outputs, G groups, C categories of each group.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype, allocate_like
from ingot.ops.check import check_same_dtype, is_integral
from ingot.ops.gradient import straight_through
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance
from ingot.ops.sample import philox

_WORD = 0xFFFFFFFF


def _weights(make: TensorMaker, *, inputs: int, hidden: int) -> tuple[Tensor, ...]:
    """Return weights and biases of a usual magnitude."""
    scale = hidden**-0.5
    shapes = (3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return tuple(make(*shape, scale=scale) for shape in shapes)


def _sizes() -> Iterator[tuple[str, int, int, int]]:
    """Yield names with rows, inputs and hidden channels."""
    yield "typical", 6, 12, 16
    yield "large", 35, 40, 90
    yield "odd", 5, 3, 7
    yield "one_row", 1, 9, 33


def _cell_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, rows, inputs, hidden in _sizes():
        weights = _weights(make, inputs=inputs, hidden=hidden)
        args = make(rows, inputs), make(rows, hidden), *weights
        yield SampleInput(name, (*args, True))
        if name != "one_row":
            yield SampleInput(f"{name}_reset_before", (*args, False))
    w_ih, w_hh, *biases = _weights(make, inputs=8, hidden=10)
    args = make.strided(4, 8), make.strided(4, 10), w_ih.T.contiguous().T, w_hh.T.contiguous().T
    yield SampleInput("strided", (*args, *biases, True))
    spread = make.spread(4, 8), make.spread(4, 10), w_ih, w_hh
    yield SampleInput("extreme", (*spread, *biases, True))


def _gru_samples(make: TensorMaker) -> Iterator[SampleInput]:
    lengths = {
        "typical": (3, 1, 4),
        "large": (5, 17, 9, 2, 17, 1, 30, 8),
        "odd": (2, 0, 3, 0),
        "one_row": (1,),
    }
    for name, _, inputs, hidden in _sizes():
        starts = torch.tensor([0, *lengths[name]]).cumsum(0).tolist()
        weights = _weights(make, inputs=inputs, hidden=hidden)
        x, h = make(starts[-1], inputs), make(len(starts) - 1, hidden)
        yield SampleInput(name, (x, h, make.tensor(starts), *weights, True))
        if name in ("typical", "odd"):
            yield SampleInput(f"{name}_reset_before", (x, h, make.tensor(starts), *weights, False))
    weights = _weights(make, inputs=8, hidden=10)
    starts = make.tensor([0, 0, 3, 0, 7, 0])[::2].contiguous()
    yield SampleInput("strided", (make.strided(7, 8), make.strided(2, 10), starts, *weights, True))
    spread = make.spread(7, 8), make.spread(2, 10), starts, *weights, True
    yield SampleInput("extreme", spread)


def _rollout_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, members, rows, steps, actions, hidden, outputs in (
        ("typical", 3, 2, 4, 3, 16, 2),
        ("large", 4, 5, 9, 6, 70, 19),
        ("odd", 2, 3, 2, 0, 7, 3),
        ("one_row", 1, 1, 5, 2, 33, 3),
    ):
        args = _rollout_args(make, members, rows, steps, actions, hidden, outputs)
        yield SampleInput(name, (*args, True))
        if name in ("typical", "odd"):
            yield SampleInput(f"{name}_reset_before", (*args, False))
    h, y, actions, *weights = _rollout_args(make, 2, 2, 3, 4, 10, 6)
    strided = make.strided(2, 2, 10), make.strided(2, 2, 6), make.strided(2, 2, 3, 4)
    yield SampleInput("strided", (*strided, weights[0].mT.contiguous().mT, *weights[1:], True))
    spread = (make.spread(*tensor.shape) for tensor in (h, y, actions))
    yield SampleInput("extreme", (*spread, *weights, True))


def _rollout_args(
    make: TensorMaker, members: int, rows: int, steps: int, actions: int, hidden: int, outputs: int
) -> tuple[Tensor, ...]:
    each = [_weights(make, inputs=outputs + actions, hidden=hidden) for _ in range(members)]
    return (
        make(members, rows, hidden),
        make(members, rows, outputs),
        make(members, rows, steps, actions),
        *map(torch.stack, zip(*each, strict=True)),
        make(members, outputs, hidden, scale=hidden**-0.5),
        make(members, outputs),
    )


def _rssm_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, shape in {
        "typical": (6, 4, 16),
        "large": (35, 9, 131),
        "odd": (5, 3, 7),
        "one_row": (1, 2, 33),
    }.items():
        noise = make.ints(1 << 40, shape[0]), make.ints(1 << 20, shape[0])
        yield SampleInput(name, (make(*shape), make(*shape), *noise, 0.01))
        if name in ("typical", "odd"):
            yield SampleInput(f"{name}_imagined", (make(*shape), None, *noise, 0.01))
    noise = make.ints(99, 8)[::2], make.ints(99, 8)[::2]
    yield SampleInput("strided", (make.strided(4, 2, 10), make.strided(4, 2, 10), *noise, 0.01))
    spread = make.spread(4, 3, 9), make.spread(4, 3, 9)
    yield SampleInput("extreme", (*spread, *noise, 0.05))


def _check_weights(
    name: str, inputs: int, hidden: int, leading: tuple[int, ...], *weights: Tensor
) -> None:
    rows = 3 * hidden
    expected = (*leading, rows, inputs), (*leading, rows, hidden), (*leading, rows)
    found = tuple(tuple(weight.shape) for weight in weights)
    if found != (*expected, expected[2]):
        raise OpError(
            f"{name}: w_ih, w_hh, b_ih and b_hh are {', '.join(map(str, found))}; "
            f"{inputs} inputs and {hidden} hidden channels need "
            f"{', '.join(map(str, (*expected, expected[2])))}",
            hint="pass (3H, I), (3H, H), (3H,) and (3H,), in the order r, z, n",
        )


def _check_cell(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    reset_after: bool,
) -> None:
    check_same_dtype("gru_cell", x=x, h=h, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh)
    if x.dim() != 2 or h.dim() != 2 or len(x) != len(h):
        raise OpError(
            f"gru_cell: x is {tuple(x.shape)}, h {tuple(h.shape)}",
            hint="pass (T, I) and (T, H)",
        )
    _check_weights("gru_cell", x.shape[1], h.shape[1], x.shape[:0], w_ih, w_hh, b_ih, b_hh)


def _check_gru(
    x: Tensor,
    h: Tensor,
    cu_seqlens: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    reset_after: bool,
) -> None:
    check_same_dtype("gru", x=x, h=h, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh)
    vector = cu_seqlens.dim() == 1 and is_integral(cu_seqlens)
    if x.dim() != 2 or h.dim() != 2 or not vector or len(cu_seqlens) != len(h) + 1:
        raise OpError(
            f"gru: x is {tuple(x.shape)}, h {tuple(h.shape)}, cu_seqlens {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}",
            hint="pass (T, I), (N, H) and N+1 integers",
        )
    _check_weights("gru", x.shape[1], h.shape[1], x.shape[:0], w_ih, w_hh, b_ih, b_hh)


def _check_rollout(
    h: Tensor,
    y: Tensor,
    actions: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    reset_after: bool,
) -> None:
    weights = {"w_ih": w_ih, "w_hh": w_hh, "b_ih": b_ih, "b_hh": b_hh}
    check_same_dtype("gru_rollout", h=h, y=y, actions=actions, **weights, w_out=w_out, b_out=b_out)
    fits = h.dim() == y.dim() == 3 and actions.dim() == 4 and actions.shape[2] > 0
    if not fits or not h.shape[:2] == y.shape[:2] == actions.shape[:2]:
        raise OpError(
            f"gru_rollout: h is {tuple(h.shape)}, y {tuple(y.shape)}, "
            f"actions {tuple(actions.shape)}",
            hint="pass (E, B, H), (E, B, O) and (E, B, S, A) with at least one step",
        )
    leading, hidden, outputs = h.shape[:1], h.shape[2], y.shape[2]
    inputs = outputs + actions.shape[3]
    _check_weights("gru_rollout", inputs, hidden, leading, w_ih, w_hh, b_ih, b_hh)
    if w_out.shape != (*leading, outputs, hidden) or b_out.shape != (*leading, outputs):
        raise OpError(
            f"gru_rollout: w_out is {tuple(w_out.shape)}, b_out {tuple(b_out.shape)}",
            hint=f"pass {(*leading, outputs, hidden)} and {(*leading, outputs)}",
        )


def _check_rssm(
    prior: Tensor, posterior: Tensor | None, seeds: Tensor, positions: Tensor, unimix: float
) -> None:
    check_same_dtype("rssm_step", prior=prior, posterior=posterior)
    if prior.dim() != 3 or not prior.shape[2]:
        raise OpError(f"rssm_step: prior is {tuple(prior.shape)}", hint="pass (T, G, C)")
    if posterior is not None and posterior.shape != prior.shape:
        raise OpError(
            f"rssm_step: prior is {tuple(prior.shape)}, posterior {tuple(posterior.shape)}",
            hint="pass logits of the same shape, or None to sample from the prior",
        )
    for noise in (seeds, positions):
        if not is_integral(noise) or noise.shape != prior.shape[:1]:
            raise OpError(
                f"rssm_step: {len(prior)} rows of logits, seeds or positions are {noise.dtype} "
                f"{tuple(noise.shape)}",
                hint="pass an integer seed and an integer position per row",
            )
    if not 0 < unimix < 1:
        raise OpError(f"rssm_step: unimix is {unimix}", hint="pass a share between 0 and 1")


def _fake_cell(x: Tensor, h: Tensor, *_: object) -> Tensor:
    return allocate_like(h)


def _fake_gru(x: Tensor, h: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], h.shape[1]))


def _fake_rollout(h: Tensor, y: Tensor, actions: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return y.new_empty((*actions.shape[:3], y.shape[2])), allocate_like(h)


def _fake_rssm(prior: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accum_dtype(prior.dtype)
    first, second = (prior.new_empty(prior.shape, dtype=dtype) for _ in range(2))
    return allocate_like(prior), first, second


def _gru_flops(rows: int, w_ih: Tensor, w_hh: Tensor) -> int:
    return 2 * rows * (w_ih.shape[-2] * w_ih.shape[-1] + w_hh.shape[-2] * w_hh.shape[-1])


def _cell_cost(x: Tensor, h: Tensor, *weights: Tensor) -> Cost:
    moved = x.nbytes + 2 * h.nbytes + sum(weight.nbytes for weight in weights[:4])
    return Cost(bytes=moved, flops=_gru_flops(x.shape[0], *weights[:2]))


def _gru_cost(x: Tensor, h: Tensor, cu_seqlens: Tensor, *weights: Tensor) -> Cost:
    out = x.shape[0] * h.shape[1] * h.element_size()
    moved = x.nbytes + h.nbytes + out + sum(weight.nbytes for weight in weights[:4])
    return Cost(bytes=moved, flops=_gru_flops(x.shape[0], *weights[:2]))


def _rollout_cost(h: Tensor, y: Tensor, actions: Tensor, *weights: Tensor) -> Cost:
    members, rows, steps, _ = actions.shape
    out = members * rows * steps * y.shape[2] * y.element_size()
    read = sum(tensor.nbytes for tensor in (h, y, actions, *weights[:6]))
    flops = members * _gru_flops(rows * steps, *weights[:2])
    flops += 2 * members * rows * steps * y.shape[2] * h.shape[2]
    return Cost(bytes=read + h.nbytes + out, flops=flops)


def _rssm_cost(prior: Tensor, posterior: Tensor | None, seeds: Tensor, *_: object) -> Cost:
    logits = prior.nbytes * (1 if posterior is None else 2)
    written = prior.nbytes + 8 * prior.numel()
    flops = prior.numel() * (8 if posterior is None else 13)
    return Cost(bytes=logits + written + 2 * seeds.nbytes, flops=flops)


def _cell(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    reset_after: bool,
) -> Tensor:
    """Return the next state; all arguments may have a leading dimension of members."""
    hidden = h.shape[-1]
    xr, xz, xn = (x @ w_ih.mT + b_ih[..., None, :]).split(hidden, -1)
    first = 2 * hidden
    hr, hz = (h @ w_hh[..., :first, :].mT + b_hh[..., None, :first]).split(hidden, -1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    kept = h if reset_after else r * h
    hn = kept @ w_hh[..., first:, :].mT + b_hh[..., None, first:]
    n = torch.tanh(xn + (r * hn if reset_after else hn))
    return (1 - z) * n + z * h


@op(
    check=_check_cell,
    fake=_fake_cell,
    samples=_cell_samples,
    tolerance=Tolerance(),
    cost=_cell_cost,
    row_args=("x", "h"),
)
def gru_cell(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    reset_after: bool = True,
) -> Tensor:
    """Return the next state (T, H) of rows with inputs x (T, I) and states h (T, H).

    >>> zeros = [torch.zeros(*shape) for shape in ((6, 3), (6, 2), (6,), (6,))]
    >>> gru_cell(torch.ones(1, 3), torch.ones(1, 2), *zeros)
    tensor([[0.5000, 0.5000]])
    """
    return _cell(x, h, w_ih, w_hh, b_ih, b_hh, reset_after)


@op(
    check=_check_gru,
    fake=_fake_gru,
    samples=_gru_samples,
    tolerance=Tolerance(),
    cost=_gru_cost,
    row_args=(),
)
def gru(
    x: Tensor,
    h: Tensor,
    cu_seqlens: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    reset_after: bool = True,
) -> Tensor:
    """Return the state (T, H) after each token of packed sequences, from initial states h (N, H).

    >>> zeros = [torch.zeros(*shape) for shape in ((6, 3), (6, 2), (6,), (6,))]
    >>> gru(torch.ones(3, 3), torch.ones(2, 2), torch.tensor([0, 2, 3]), *zeros)
    tensor([[0.5000, 0.5000],
            [0.2500, 0.2500],
            [0.5000, 0.5000]])
    """
    starts, lengths = cu_seqlens.tolist(), cu_seqlens.diff()
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] != len(x):
        raise OpError(
            f"gru: cu_seqlens is {starts[:8]} for {len(x)} tokens",
            hint="pass the cumulative lengths, from 0 to the number of tokens",
        )
    if not len(x):
        return x.new_zeros(0, h.shape[1])
    states: list[Tensor] = []
    for step in range(int(lengths.max())):
        # Sequences that have ended compute a value that is not used.
        token = (cu_seqlens[:-1] + step).clamp(max=len(x) - 1)
        h = _cell(x[token], h, w_ih, w_hh, b_ih, b_hh, reset_after)
        states.append(h)
    sequence = torch.repeat_interleave(lengths)
    position = torch.arange(len(x), device=x.device) - cu_seqlens[sequence]
    return torch.stack(states)[position, sequence]


@op(
    check=_check_rollout,
    fake=_fake_rollout,
    samples=_rollout_samples,
    tolerance=Tolerance(),
    cost=_rollout_cost,
    row_args=(),
)
def gru_rollout(
    h: Tensor,
    y: Tensor,
    actions: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    reset_after: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (E, B, S, O) of each step, and the states (E, B, H) after the last one.

    The input of a step is the output of the step before, at first y (E, B, O), followed by its
    actions, of actions (E, B, S, A). The output is `w_out h + b_out`, with `w_out` (E, O, H). All
    weights have the members of the ensemble as their first dimension.

    >>> members, rows, steps, hidden, outputs = 5, 1, 50, 8, 2
    >>> h, y = torch.zeros(members, rows, hidden), torch.zeros(members, rows, outputs)
    >>> shapes = (24, 3), (24, 8), (24,), (24,), (2, 8), (2,)
    >>> weights = [torch.ones(members, *shape) for shape in shapes]
    >>> outputs, h = gru_rollout(h, y, torch.ones(members, rows, steps, 1), *weights)
    >>> outputs.shape, h.shape
    (torch.Size([5, 1, 50, 2]), torch.Size([5, 1, 8]))
    """
    outputs: list[Tensor] = []
    for action in actions.unbind(2):
        h = _cell(torch.cat([y, action], -1), h, w_ih, w_hh, b_ih, b_hh, reset_after)
        y = h @ w_out.mT + b_out[:, None]
        outputs.append(y)
    return torch.stack(outputs, 2), h


@op(
    check=_check_rssm,
    fake=_fake_rssm,
    samples=_rssm_samples,
    tolerance=Tolerance(),
    cost=_rssm_cost,
    row_args=("prior", "posterior", "seeds", "positions"),
    gradient=straight_through,
)
def rssm_step(
    prior: Tensor,
    posterior: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    unimix: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sample, one-hot (T, G, C), and the log-probabilities of the prior and posterior.

    The probabilities are `(1 - unimix) softmax(logits) + unimix / C`, so that no category becomes
    impossible and divergences are finite. The sample is from the posterior; from the prior if
    `posterior` is None, as in imagined steps, whose third result is that of the prior too. Its
    random numbers are a function of the row's seed and position, and of the group. The gradient of
    the sample is passed to the probabilities unchanged (straight-through).

    >>> seed, position = torch.tensor([7]), torch.tensor([0])
    >>> sample, prior, _ = rssm_step(torch.zeros(1, 1, 4), None, seed, position)
    >>> sample, prior.exp()
    (tensor([[[0., 0., 0., 1.]]]), tensor([[[0.2500, 0.2500, 0.2500, 0.2500]]]))
    """
    prior_p = _mixed_probs(prior, unimix)
    p = prior_p if posterior is None else _mixed_probs(posterior, unimix)
    fixed = p.detach()
    cumulative = fixed.cumsum(-1)
    threshold = _uniform(seeds, positions, p.shape[1]).to(p.dtype) * cumulative[..., -1]
    # Due to rounding, no sum may exceed the threshold: then take the last category.
    index = (cumulative <= threshold[..., None]).sum(-1).clamp(max=p.shape[-1] - 1)
    one_hot = torch.zeros_like(fixed).scatter(-1, index[..., None], 1.0)
    # A copy: outputs may not share memory.
    return one_hot + (p - fixed), prior_p.log(), p.log()


def _mixed_probs(logits: Tensor, unimix: float) -> Tensor:
    return (1 - unimix) * torch.softmax(logits, -1) + unimix / logits.shape[-1]


def _uniform(seeds: Tensor, positions: Tensor, groups: int) -> Tensor:
    """Return a random number in [0, 1) for each row and group, with 24 bits, in float64."""
    seeds, positions = seeds.long()[:, None], positions.long()[:, None]
    group = torch.arange(groups, device=seeds.device).expand(len(seeds), groups)
    zero = torch.zeros_like(group)
    counter = (positions & _WORD) + zero, ((positions >> 32) & _WORD) + zero, group, zero
    word, *_ = philox(counter, ((seeds & _WORD) + zero, ((seeds >> 32) & _WORD) + zero))
    return (word >> 8).double() * 2.0**-24
