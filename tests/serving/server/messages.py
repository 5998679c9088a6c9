"""Messages that several tests need."""

from __future__ import annotations

from ingot.serving.workers.wire import EngineReady

READY = EngineReady(
    model="m",
    vocab_size=9,
    max_model_len=8,
    block_size=4,
    num_blocks=20,
    kv_cache_dtype="int8",
    kv_cache_bytes=960,
)
