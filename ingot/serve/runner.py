"""One forward of the decoder for all of a step's work, over the paged pool.

    runner = Runner(decoder, limits)
    hidden_TD = runner.run(plan.work)    # the state of every token, in the order of the work

Nothing is made anew for a step: the plan's tensors stay where they are and get new values. So a
step of few tokens can be recorded when its shape (tokens, requests) comes for the second time, and
replayed without Python from then on: at batch 1 Python between the kernels takes as long as they
do. A request's row of the block table is written only when its blocks have changed.

Legend: T tokens of a step, B requests of a step, M blocks of the longest, D channels.
"""

# pyright: basic
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ingot.nn import Decoder, KVPool, Plan
from ingot.ops.replay import record
from ingot.serve.scheduler import Limits, Work

RECORDED = 64  # tokens of the largest step that is recorded: beyond, kernels outlast Python
KEPT = 128  # recordings


class Runner:
    """A decoder, its pool of keys and values, and the tensors of a step.

    >>> from ingot.nn import preset
    >>> runner = Runner(Decoder.new(preset("tiny"), seed=0), Limits(blocks=4, block_size=16))
    >>> runner.run([Work(1, 0, (5, 6, 7), (2,), True)]).shape
    torch.Size([3, 64])
    """

    def __init__(self, decoder: Decoder, limits: Limits) -> None:
        self.decoder, self.size = decoder, limits.block_size
        device = decoder.embed.weight.device
        self.pool = KVPool(decoder.kv_spec, limits.blocks, limits.block_size, device)
        tokens, rows = limits.budget, limits.max_running
        self._tokens, self._positions, self._slots = (
            torch.zeros(tokens, dtype=torch.int64) for _ in "tps"
        )
        self._starts = torch.zeros(rows + 1, dtype=torch.int32)
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._rows = rows
        self._widen(8)
        self._seen: set[tuple[int, int]] = set()

    def _widen(self, blocks: int) -> None:
        """Have room for so many blocks in a row of the table; recordings hold the old one."""
        self._table = torch.zeros(self._rows, blocks, dtype=torch.int32)
        self._holds: list[tuple[int, ...]] = [()] * self._rows
        self._recordings: OrderedDict[tuple[int, int], Callable[[], Tensor]] = OrderedDict()

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        """The normalized state of each token of the work, (T, D)."""
        shape = self._fill(work)
        recording = self._recordings.get(shape)
        if recording is not None:
            self._recordings.move_to_end(shape)
            return recording()
        if shape[0] > RECORDED:
            return self._forward(*shape)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._forward(*shape)
        hidden_TD, self._recordings[shape] = record(lambda: self._forward(*shape))
        if len(self._recordings) > KEPT:
            self._recordings.popitem(last=False)
        return hidden_TD

    def _forward(self, tokens: int, requests: int) -> Tensor:
        positions_T = self._positions[:tokens]
        plan = Plan(
            cu_seqlens=self._starts[: requests + 1],
            context_lens=self._contexts[:requests],
            block_table=self._table[:requests],
            slots=self._slots[:tokens],
            pool=self.pool,
        )
        return self.decoder(self._tokens[:tokens], positions_T, plan)

    def _fill(self, work: Sequence[Work]) -> tuple[int, int]:
        """Write the work into the tensors; how many tokens and requests there are."""
        widest = max([len(item.table) for item in work])
        if widest > self._table.shape[1]:
            self._widen(1 << (widest - 1).bit_length())
        holds, table_BM = self._holds, self._table.numpy()
        for row, item in enumerate(work):
            if holds[row] is not item.table:
                holds[row] = item.table
                table_BM[row, : len(item.table)] = item.table
        rows = len(work)
        begin_B = np.array([item.start for item in work])
        count_B = np.array([len(item.tokens) for item in work])
        starts_B = self._starts.numpy()[: rows + 1]
        count_B.cumsum(out=starts_B[1:])
        total = int(starts_B[rows])
        np.add(begin_B, count_B, out=self._contexts.numpy()[:rows], casting="same_kind")
        positions_T = self._positions.numpy()[:total]
        if total == rows:
            row_T, positions_T[:] = np.arange(rows), begin_B
        else:
            row_T = np.repeat(np.arange(rows), count_B)
            np.add(np.arange(total), (begin_B - starts_B[:-1])[row_T], out=positions_T)
        block_T, offset_T = np.divmod(positions_T, self.size)
        first_T = table_BM[row_T, block_T] * np.int64(self.size)
        np.add(first_T, offset_T, out=self._slots.numpy()[:total])
        self._tokens.numpy()[:total] = list(chain.from_iterable([item.tokens for item in work]))
        return total, rows
