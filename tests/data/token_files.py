"""Documents on disk as tokens, without text and without a vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ingot.data.shard import Shard, TokenStream, write

SIZE = 1 << 16
DOCUMENTS = st.lists(
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=12
)


def tokens(directory: Path, documents: list[list[int]], per_shard: int) -> TokenStream:
    """Write the documents to shards of `per_shard` documents."""
    shards: list[Shard] = []
    for start in range(0, len(documents), per_shard):
        path = directory / f"{start}.tokens"
        facts = write(path, [np.array(d) for d in documents[start : start + per_shard]], 2)
        shards.append(Shard(path, facts, 2, SIZE))
    return TokenStream(shards)
