"""Runner: one forward pass of the decoder for all scheduled sequences, over the paged KV cache.

    runner = Runner(decoder, config)
    hidden_TD = runner.run(output.scheduled)    # hidden states, in the order of the sequences
    hidden_RD, positions_R = runner.select_sampled(hidden_TD)   # for the sampler

The input tensors are allocated once and overwritten in every step. So a small step can be captured
and, when its shape (tokens, requests) occurs again, replayed without Python: at batch 1 the Python
code between the kernels takes as long as they do. A request's row of the block table is written
only when its blocks have changed.

All inputs are in one staging buffer, also those that only the sampler needs: an accelerator gets
them with one copy per step. For steps of one token per request a short prefix of it suffices. On
the CPU, the buffer is the memory of the tensors.

Legend: T tokens of a step, B requests of a step, M blocks of the longest, D channels, R tokens to
sample.
"""

# pyright: basic
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ingot.core.device import CUDA_GRAPH_DEVICES
from ingot.core.errors import ConfigError
from ingot.nn import BatchLayout, Decoder, KVCache
from ingot.ops.replay import capture
from ingot.serving.engine.scheduler import ScheduledSeq, SchedulerConfig
from ingot.serving.engine.staging import StagingArray, StagingBuffer

MAX_CAPTURED_TOKENS = 64  # in larger steps the kernels take longer than the Python code
MAX_CAPTURES = 128


class _TokenInputs(NamedTuple):
    """Inputs with one item for each token, and where they end in the staging buffer."""

    tokens: StagingArray
    positions: StagingArray
    slots: StagingArray
    sampled_rows: StagingArray
    sampled_positions: StagingArray
    adapters: StagingArray
    end: int


class _Shape(NamedTuple):
    """What the ops of a step depend on, besides the content of its inputs."""

    tokens: int
    requests: int
    adapted: bool
    """Whether a token has an adapter; a step without any computes the base model alone."""


class Runner:
    """A decoder, its KV cache, and the input tensors of a step.

    >>> from ingot.nn import preset
    >>> config = SchedulerConfig(num_blocks=4, block_size=16)
    >>> runner = Runner(Decoder.from_config(preset("tiny"), seed=0), config)
    >>> with torch.inference_mode():
    ...     hidden_TD = runner.run([ScheduledSeq(1, 0, (5, 6, 7), (2,), True)])
    ...     hidden_RD, positions_R = runner.select_sampled(hidden_TD)
    >>> hidden_TD.shape, hidden_RD.shape, positions_R
    (torch.Size([3, 64]), torch.Size([1, 64]), tensor([3]))
    """

    def __init__(
        self,
        decoder: Decoder,
        config: SchedulerConfig,
        *,
        num_scratch_blocks: int = 0,
        kv_cache: KVCache | None = None,
        captures: bool = True,
    ) -> None:
        self.decoder, self.config, self.size = decoder, config, config.block_size
        device, spec = decoder.device, decoder.kv_spec
        if spec.dtype == torch.int8 and device.type != "cpu":
            raise ConfigError(
                f"kv_cache_dtype: int8 is supported on a CPU only, got device {device}",
                hint="use kv_cache_dtype 'auto', or device 'cpu'",
            )
        self._device = device
        num_blocks = config.num_blocks + num_scratch_blocks
        self.kv_cache = kv_cache or KVCache(spec, num_blocks, self.size, device)
        self.scratch_blocks = range(config.num_blocks, num_blocks)
        """Blocks that the scheduler does not know, for keys and values of draft tokens."""
        self._max_tokens, self._rows = config.prefill_only_budget, config.max_num_seqs
        self._steps = torch.arange(self._rows + 1, dtype=torch.int32, device=device)
        self._allocate(8)
        self._captures_steps = captures
        self._seen: set[_Shape] = set()
        self._num_sampled, self._samples_all = 0, False

    def _allocate(self, blocks: int) -> None:
        """Allocate inputs with this many blocks per request, and drop the captures of the old."""
        rows = self._rows
        starts_at = 4 * rows * blocks
        contexts_at = starts_at + 4 * (rows + 1)
        tokens_at = -(-(contexts_at + 4 * rows) // 8) * 8
        staging = self._staging = StagingBuffer(tokens_at + 44 * self._max_tokens, self._device)
        self._table = staging.part(0, (rows, blocks), np.int32)
        self._table_BM = self._table.array
        self._starts = staging.part(starts_at, (rows + 1,), np.int32)
        self._contexts = staging.part(contexts_at, (rows,), np.int32)
        self._small, self._large = (
            _TokenInputs(
                *[staging.part(tokens_at + 8 * size * n, (size,), np.int64) for n in range(5)],
                adapters=staging.part(tokens_at + 40 * size, (size,), np.int32),
                end=tokens_at + 44 * size,
            )
            for size in (rows, self._max_tokens)
        )
        self._inputs = self._small
        self._position_views: dict[int, Tensor] = {}
        self._row_tables: list[tuple[int, ...]] = [()] * rows
        self._captures: OrderedDict[_Shape, Callable[[], Tensor]] = OrderedDict()

    def run(self, work: Sequence[ScheduledSeq], slots: Sequence[int] | None = None) -> Tensor:
        """Return the normalized hidden state of each scheduled token, (T, D).

        `slots` are the adapters of the sequences, as slots of the decoder; -1 for the base model.
        A captured step on a GPU returns the same tensor each time: use it before the next step.
        """
        self._staging.wait()
        if slots is not None and max(slots) < 0:
            slots = None
        shape = _Shape(*self._fill(work), slots is not None)
        if slots is not None:
            self._fill_adapters(work, slots)
        self._staging.copy_to_device(self._inputs.end)
        replay = self._captures.get(shape)
        if replay is not None:
            self._captures.move_to_end(shape)
            return replay()
        if not self._can_capture(shape):
            return self._forward(shape)
        if shape not in self._seen and not self._captures_first(shape):
            self._seen.add(shape)
            return self._forward(shape)
        hidden_TD, self._captures[shape] = capture(lambda: self._forward(shape), self._device)
        if len(self._captures) > MAX_CAPTURES:
            self._captures.popitem(last=False)
        return hidden_TD

    def select_sampled(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the last step after which a token is sampled, (R, D), and
        the positions of the sampled tokens, (R).

        These are the last known token of each sequence that needs sampling, and its draft tokens.
        """
        inputs, count = self._inputs, self._num_sampled
        if not self._samples_all:
            rows_R = inputs.sampled_rows.tensor[:count]
            return hidden_TD.index_select(0, rows_R), inputs.sampled_positions.tensor[:count]
        positions_R = self._position_views.get(count)
        if positions_R is None:  # a slice takes 2 us, which is 2 % of a small model's step
            positions_R = self._position_views[count] = inputs.sampled_positions.tensor[:count]
        return hidden_TD, positions_R

    def _can_capture(self, shape: _Shape) -> bool:
        """Return whether a step is small enough; a CUDA graph is worth its memory for decoding."""
        if shape.tokens > MAX_CAPTURED_TOKENS or not self._captures_steps:
            return False
        kind = self._device.type
        return kind == "cpu" or (kind in CUDA_GRAPH_DEVICES and shape.tokens == shape.requests)

    def _captures_first(self, shape: _Shape) -> bool:
        """Return whether the first step of a shape is captured, not the second: most prefills have
        a shape of their own, and a CUDA graph needs kernels that are compiled."""
        return shape.tokens == shape.requests and self._device.type == "cpu"

    def _forward(self, shape: _Shape) -> Tensor:
        inputs, (tokens, requests, adapted) = self._inputs, shape
        starts = self._steps if tokens == requests else self._starts.tensor
        layout = BatchLayout(
            positions=inputs.positions.tensor[:tokens],
            cu_seqlens=starts[: requests + 1],
            context_lens=self._contexts.tensor[:requests],
            block_table=self._table.tensor[:requests],
            slot_mapping=inputs.slots.tensor[:tokens],
            kv_cache=self.kv_cache,
            adapters=inputs.adapters.tensor[:tokens] if adapted else None,
        )
        return self.decoder(inputs.tokens.tensor[:tokens], layout)

    def _fill(self, work: Sequence[ScheduledSeq]) -> tuple[int, int]:
        """Write the inputs of a step; return the numbers of its tokens and requests."""
        row_tables = self._row_tables
        for row, item in enumerate(work):
            table = item.block_table
            if row_tables[row] is not table:
                if len(table) > self._table_BM.shape[1]:
                    self._allocate(1 << (len(table) - 1).bit_length())
                    return self._fill(work)
                row_tables[row] = table
                self._table_BM[row, : len(table)] = table
        total = sum([len(item.tokens) for item in work])
        self._inputs = self._small if total <= self._rows else self._large
        if total == len(work):
            self._fill_single(work)
        else:
            self._fill_several(work, total)
        self._num_sampled = sum([item.needs_sampling for item in work])
        self._samples_all = self._num_sampled == total  # each row, in order
        if self._num_sampled and not self._samples_all:
            self._num_sampled = self._fill_sampled(work)
        return total, len(work)

    def _fill_single(self, work: Sequence[ScheduledSeq]) -> None:
        """Write one token per request. This loop takes a microsecond per request; a dozen numpy
        calls take 0.1 ms here, because the weights have evicted numpy's code from the caches."""
        size, inputs, contexts = self.size, self._inputs, self._contexts.items
        tokens, positions, slots = inputs.tokens.items, inputs.positions.items, inputs.slots.items
        sampled_positions = inputs.sampled_positions.items
        for row, item in enumerate(work):
            position = item.start
            tokens[row] = item.tokens[0]
            positions[row] = position
            contexts[row] = sampled_positions[row] = position + 1
            slots[row] = item.block_table[position // size] * size + position % size

    def _fill_several(self, work: Sequence[ScheduledSeq], total: int) -> None:
        rows, inputs = len(work), self._inputs
        begin_B = np.array([item.start for item in work])
        count_B = np.array([len(item.tokens) for item in work])
        starts_B, positions_T = self._starts.array, inputs.positions.array[:total]
        starts_B[1 : rows + 1] = count_B.cumsum()
        self._contexts.array[:rows] = begin_B + count_B
        row_T = np.repeat(np.arange(rows), count_B)
        positions_T[:] = np.arange(total) + (begin_B - starts_B[:rows])[row_T]
        block_T, offset_T = np.divmod(positions_T, self.size)
        first_T = self._table_BM[row_T, block_T] * np.int64(self.size)
        inputs.slots.array[:total] = first_T + offset_T
        inputs.tokens.array[:total] = list(chain.from_iterable([item.tokens for item in work]))

    def _fill_adapters(self, work: Sequence[ScheduledSeq], slots: Sequence[int]) -> None:
        """Write the slot of the adapter of each token."""
        staged, counts = self._inputs.adapters, [len(item.tokens) for item in work]
        total = sum(counts)
        if total > len(work):
            staged.array[:total] = np.repeat(slots, counts)
        else:  # a loop, as in _fill_single
            for row, slot in enumerate(slots):
                staged.items[row] = slot

    def _fill_sampled(self, work: Sequence[ScheduledSeq]) -> int:
        """Write after which rows tokens are sampled, and at which positions; return how many."""
        rows: list[int] = []
        positions: list[int] = []
        at = 0
        for item in work:
            count = len(item.tokens)
            if item.needs_sampling:
                known = count - item.num_draft_tokens
                rows += range(at + known - 1, at + count)
                positions += range(item.start + known, item.start + count + 1)
            at += count
        self._inputs.sampled_rows.array[: len(rows)] = rows
        self._inputs.sampled_positions.array[: len(rows)] = positions
        return len(rows)
