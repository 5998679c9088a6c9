"""Runner: one forward pass of the decoder for all scheduled sequences, over the paged KV cache.

    runner = Runner(decoder, config)
    hidden_TD = runner.run(output.scheduled)    # hidden states, in the order of the sequences

The input tensors are allocated once and overwritten in every step. So a small step can be captured
when its shape (tokens, requests) occurs for the second time, and replayed without Python from then
on: at batch 1 the Python code between the kernels takes as long as they do. A request's row of the
block table is written only when its blocks have changed.

On devices other than the CPU the inputs are copied in every step, and nothing is captured.

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

from ingot.nn import BatchLayout, Decoder, KVCache
from ingot.ops.replay import capture
from ingot.serving.engine.scheduler import ScheduledSeq, SchedulerConfig

MAX_CAPTURED_TOKENS = (
    64  # tokens of the largest step that is recorded: beyond, kernels outlast Python
)
MAX_CAPTURES = 128  # recordings


class Runner:
    """A decoder, its pool of keys and values, and the tensors of a step.

    >>> from ingot.nn import preset
    >>> config = SchedulerConfig(num_blocks=4, block_size=16)
    >>> runner = Runner(Decoder.from_config(preset("tiny"), seed=0), config)
    >>> with torch.inference_mode():
    ...     runner.run([ScheduledSeq(1, 0, (5, 6, 7), (2,), True)]).shape
    torch.Size([3, 64])
    """

    def __init__(self, decoder: Decoder, config: SchedulerConfig) -> None:
        self.decoder, self.size = decoder, config.block_size
        device = self._device = decoder.device
        self.kv_cache = KVCache(decoder.kv_spec, config.num_blocks, config.block_size, device)
        tokens, self._rows = config.prefill_only_budget, config.max_num_seqs
        self._tokens, self._positions, self._slots = (
            _StagingBuffer((tokens,), np.int64, device) for _ in "tps"
        )
        self._starts = _StagingBuffer((self._rows + 1,), np.int32, device)
        self._contexts = _StagingBuffer((self._rows,), np.int32, device)
        self._steps = torch.arange(self._rows + 1, dtype=torch.int32, device=device)
        self._widen(8)
        self._seen: set[tuple[int, int]] = set()

    def _widen(self, blocks: int) -> None:
        """Have room for so many blocks in a row of the table; recordings hold the old one."""
        self._table = _StagingBuffer((self._rows, blocks), np.int32, self._device)
        self._table_BM = self._table.array
        self._row_tables: list[tuple[int, ...]] = [()] * self._rows
        self._captures: OrderedDict[tuple[int, int], Callable[[], Tensor]] = OrderedDict()

    def run(self, work: Sequence[ScheduledSeq]) -> Tensor:
        """The normalized state of each token of the work, (T, D)."""
        shape = self._fill(work)
        if self._device.type != "cpu":
            for integers in (
                *(self._tokens, self._positions, self._slots, self._starts, self._contexts),
                self._table,
            ):
                integers.copy_to_device()
            return self._forward(*shape)
        replay = self._captures.get(shape)
        if replay is not None:
            self._captures.move_to_end(shape)
            return replay()
        if shape[0] > MAX_CAPTURED_TOKENS:
            return self._forward(*shape)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._forward(*shape)
        hidden_TD, self._captures[shape] = capture(lambda: self._forward(*shape))
        if len(self._captures) > MAX_CAPTURES:
            self._captures.popitem(last=False)
        return hidden_TD

    def _forward(self, tokens: int, requests: int) -> Tensor:
        starts = self._steps if tokens == requests else self._starts.tensor
        layout = BatchLayout(
            positions=self._positions.tensor[:tokens],
            cu_seqlens=starts[: requests + 1],
            context_lens=self._contexts.tensor[:requests],
            block_table=self._table.tensor[:requests],
            slot_mapping=self._slots.tensor[:tokens],
            kv_cache=self.kv_cache,
        )
        return self.decoder(self._tokens.tensor[:tokens], layout)

    def _fill(self, work: Sequence[ScheduledSeq]) -> tuple[int, int]:
        """Write the work into the tensors; how many tokens and requests there are."""
        row_tables = self._row_tables
        for row, item in enumerate(work):
            table = item.block_table
            if row_tables[row] is not table:
                if len(table) > self._table_BM.shape[1]:
                    self._widen(1 << (len(table) - 1).bit_length())
                    return self._fill(work)
                row_tables[row] = table
                self._table_BM[row, : len(table)] = table
        total = sum([len(item.tokens) for item in work])
        if total == len(work):
            self._fill_single(work)
        else:
            self._fill_several(work, total)
        return total, len(work)

    def _fill_single(self, work: Sequence[ScheduledSeq]) -> None:
        """One token each. Weights that streamed by have thrown numpy out of the caches: a dozen of
        its calls take 0.1 ms here, this loop a microsecond a request."""
        size = self.size
        tokens, positions, slots = self._tokens.items, self._positions.items, self._slots.items
        contexts = self._contexts.items
        for row, item in enumerate(work):
            position = item.start
            tokens[row] = item.tokens[0]
            positions[row] = position
            contexts[row] = position + 1
            slots[row] = item.block_table[position // size] * size + position % size

    def _fill_several(self, work: Sequence[ScheduledSeq], total: int) -> None:
        rows = len(work)
        begin_B = np.array([item.start for item in work])
        count_B = np.array([len(item.tokens) for item in work])
        starts_B, positions_T = self._starts.array, self._positions.array[:total]
        starts_B[1 : rows + 1] = count_B.cumsum()
        self._contexts.array[:rows] = begin_B + count_B
        row_T = np.repeat(np.arange(rows), count_B)
        positions_T[:] = np.arange(total) + (begin_B - starts_B[:rows])[row_T]
        block_T, offset_T = np.divmod(positions_T, self.size)
        first_T = self._table_BM[row_T, block_T] * np.int64(self.size)
        self._slots.array[:total] = first_T + offset_T
        self._tokens.array[:total] = list(chain.from_iterable([item.tokens for item in work]))


class _StagingBuffer:
    """The same memory for torch, for numpy and, number by number, for Python; on another device
    torch has a copy of its own."""

    def __init__(
        self, shape: tuple[int, ...], dtype: type[np.integer], device: torch.device
    ) -> None:
        self.array = np.zeros(shape, dtype)
        self._host = torch.from_numpy(self.array)
        self.tensor = self._host.to(device)
        self.items = self.array.data

    def copy_to_device(self) -> None:
        """Let the copy be as the memory is."""
        self.tensor.copy_(self._host)
