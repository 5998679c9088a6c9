"""The parameters of a group, a few megabytes at a time.

An update by `torch._foreach_*` makes temporaries as large as what it is given. For a whole model
these are new pages at every step, which the kernel has to clear, and nothing of one pass is in a
cache for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

PIECE = 2**24  # bytes


def pieces(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters that have a gradient, in lists of at most `PIECE` bytes; or one alone.

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.zeros(2**21)) for _ in range(5)]
    >>> for weight in weights[1:]:
    ...     weight.grad = torch.zeros_like(weight)
    >>> [len(piece) for piece in pieces(weights)]
    [2, 2]
    """
    held: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if held and size + parameter.nbytes > PIECE:
            yield held
            held, size = [], 0
        held.append(parameter)
        size += parameter.nbytes
    if held:
        yield held
