"""Time of `gru_rollout` and of what PyTorch offers for it, on one core.

    taskset -c 0 python -m benchmarks.gru_rollout [H ...]

rolls out 5 members for 50 steps (one row, 2 outputs that are fed back, 6 actions), in float32, by

    eager             a loop over members and steps: GRUCell, then the output's linear layer
    step              the same loop, with the step of a member compiled by Inductor
    ensemble step     a loop over steps, with the step of all members (bmm) compiled
    rollout           the rollout of all members and steps compiled as one graph

each compiled in the default mode and with max-autotune, except the last. All of them take turns,
and the CPU time of the process is measured, on one thread, so that other processes disturb it less.
Prints the median times and the median ratio to `gru_rollout` of the calls of a turn, with its 20th
and 80th percentile.
"""

# pyright: basic
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot import ops

MEMBERS, STEPS, OUTPUTS, ACTIONS = 5, 50, 2, 6
ROUNDS = 40

Rollout = Callable[..., Tensor]


def make_inputs(hidden: int) -> list[Tensor]:
    """Return the arguments of `gru_rollout` for one row."""
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(MEMBERS, *shape, generator=random) * hidden**-0.5

    shapes = (1, hidden), (1, OUTPUTS), (1, STEPS, ACTIONS), (3 * hidden, OUTPUTS + ACTIONS)
    weights = (3 * hidden, hidden), (3 * hidden,), (3 * hidden,), (OUTPUTS, hidden), (OUTPUTS,)
    return [make(*shape) for shape in (*shapes, *weights)]


def make_cells(args: list[Tensor]) -> list[nn.GRUCell]:
    """Return a GRUCell with the weights of each member."""
    cells: list[nn.GRUCell] = []
    for member in range(MEMBERS):
        w_ih, w_hh, b_ih, b_hh = (arg[member] for arg in args[3:7])
        cell = nn.GRUCell(w_ih.shape[1], w_hh.shape[1])
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell.load_state_dict(dict(zip(names, (w_ih, w_hh, b_ih, b_hh), strict=True)))
        cells.append(cell)
    return cells


def loop_over_members(args: list[Tensor], step: Callable[..., Any]) -> Tensor:
    """Roll out each member by calls of step(cell, y, action, h, w_out, b_out)."""
    outputs: list[Tensor] = []
    for member, cell in enumerate(make_loop_cells(args)):
        h, y, actions, w_out, b_out = (args[i][member] for i in (0, 1, 2, 7, 8))
        for action in actions.unbind(1):
            h, y = step(cell, y, action, h, w_out, b_out)
            outputs.append(y)
    return torch.stack(outputs)


_CELLS: dict[int, list[nn.GRUCell]] = {}


def make_loop_cells(args: list[Tensor]) -> list[nn.GRUCell]:
    """Return the cells of these arguments, made once."""
    return _CELLS.setdefault(id(args), make_cells(args))


def member_step(
    cell: nn.GRUCell, y: Tensor, action: Tensor, h: Tensor, w_out: Tensor, b_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a step of one member."""
    h = cell(torch.cat([y, action], -1), h)
    return h, F.linear(h, w_out, b_out)


def ensemble_step(h: Tensor, y: Tensor, action: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a step of all members."""
    w_ih, w_hh, b_ih, b_hh, w_out, b_out = weights
    x = torch.cat([y, action], -1)
    xr, xz, xn = (torch.bmm(x, w_ih.mT) + b_ih[:, None]).chunk(3, -1)
    hr, hz, hn = (torch.bmm(h, w_hh.mT) + b_hh[:, None]).chunk(3, -1)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    h = (1 - z) * n + z * h
    return h, torch.bmm(h, w_out.mT) + b_out[:, None]


def loop_over_steps(args: list[Tensor], step: Callable[..., Any]) -> Tensor:
    """Roll out all members by calls of step(h, y, action, weights)."""
    h, y, actions, *weights = args
    outputs: list[Tensor] = []
    for action in actions.unbind(2):
        h, y = step(h, y, action, *weights)
        outputs.append(y)
    return torch.stack(outputs, 2)


def whole_rollout(*args: Tensor) -> Tensor:
    """Roll out all members in one graph."""
    return loop_over_steps(list(args), ensemble_step)


def variants(args: list[Any]) -> dict[str, Callable[[], Tensor]]:
    """Return what is timed, by name."""

    def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
        return torch.compile(function, mode=mode)

    torch.compiler.reset()
    found: dict[str, Callable[[], Tensor]] = {
        "gru_rollout": lambda: ops.gru_rollout(*args)[0],
        "eager": lambda: loop_over_members(args, member_step),
    }
    for label, mode in (("", None), (", max-autotune", "max-autotune-no-cudagraphs")):
        step, ensemble = compiled(member_step, mode), compiled(ensemble_step, mode)
        found[f"step{label}"] = lambda step=step: loop_over_members(args, step)
        found[f"ensemble step{label}"] = lambda step=ensemble: loop_over_steps(args, step)
    rollout = compiled(whole_rollout)
    found["rollout"] = lambda: rollout(*args)
    return found


def measure(hidden: int) -> None:
    """Print the table of one number of hidden channels."""
    args = make_inputs(hidden)
    calls = variants(args)
    expected = calls["gru_rollout"]().flatten()
    for call in calls.values():
        torch.testing.assert_close(call().flatten(), expected, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    own = np.array(times["gru_rollout"])
    print(f"H {hidden}")  # noqa: T201
    for name, seconds in times.items():
        low, middle, high = np.percentile(np.array(seconds) / own, [20, 50, 80])
        line = f"  {name:<28} {1e3 * np.median(seconds):9.3f} ms"
        print(f"{line} {middle:7.2f}x ({low:.2f}-{high:.2f})", flush=True)  # noqa: T201


def main(widths: list[int]) -> None:
    """Measure each number of hidden channels on one thread."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for hidden in widths or [64, 256, 1024]:
        measure(hidden)


if __name__ == "__main__":
    main([int(width) for width in sys.argv[1:]])
