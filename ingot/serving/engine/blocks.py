"""Block allocator and prefix cache: reference counts and content keys of KV-cache blocks.

A block holds `block_size` tokens of one sequence. The pool holds no tensors: block 7 is block 7 of
the runner's KV cache. A full block gets a key, a hash of its content:

    root_key(adapter, model_version, cache_salt)   SHA-256 of the three
    block_key(parent, tokens)                      SHA-256 of the parent's key and the tokens

so a key identifies all tokens from the start of the sequence, the weights that computed them and
the tenant that may reuse them. The hash is SHA-256 because a client that finds a collision could
read another tenant's cache. Equal keys imply equal bits, as the kernels are batch-invariant; a
block with a key is never written again.

A block is *used* (it is in the block tables of `refs` sequences) or *free*. A free block keeps its
key until it is reallocated, so that a finished sequence serves as a cache. Free blocks without a
key are reallocated first, then the least recently used; of one sequence the last block goes first,
because a block cannot be found without those before it.

All operations take O(1) time per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct, pack


def root_key(adapter: str, model_version: str, cache_salt: bytes) -> bytes:
    """Return the parent key of a sequence's first block.

    >>> root_key("", "v1", b"alice") == root_key("", "v1", b"bob")
    False
    """
    parts = (adapter.encode(), model_version.encode(), cache_salt)
    return sha256(b"".join(pack("<Q", len(part)) + part for part in parts)).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full block.

    >>> block_key(root_key("", "v1", b""), (1, 2, 3, 4)).hex()[:8]
    '7d8ef086'
    """
    return sha256(parent + _packer(len(tokens))(*tokens)).digest()


@lru_cache(maxsize=64)
def _packer(count: int) -> Callable[..., bytes]:
    """Return what packs `count` tokens: parsing the format takes longer than packing."""
    return Struct(f"<{count}I").pack


class BlockPool:
    """Reference counts, keys and free list of all blocks.

    >>> pool = BlockPool(4)
    >>> table = pool.allocate(3)
    >>> table, pool.allocate(2), pool.num_free
    ((0, 1, 2), None, 1)
    >>> pool.seal(table[0], b"key of block 0")
    >>> pool.release(table)
    >>> pool.num_free, pool.find_cached([b"key of block 0", b"another"])
    (4, (0,))
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self._block_by_key: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Number of blocks without users; some of them may be cached."""
        return len(self._free)

    def find_cached(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Return the blocks of the longest cached prefix of `keys`, without allocating them."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def allocate(self, count: int, cached: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Use the `cached` blocks and `count` others; return None and change nothing if too few
        are free."""
        refs, free = self.refs, self._free
        if count + sum(not refs[block] for block in cached) > len(free):
            return None
        for block in cached:
            if not refs[block]:
                del free[block]
            refs[block] += 1
        return cached + tuple([self._take() for _ in range(count)])

    def seal(self, block: int, key: bytes) -> None:
        """Give a full block its key. If another block has the same key, that one stays cached."""
        if self.keys[block] is not None or not self.refs[block]:
            raise ValueError(f"block {block} is sealed already, or free")
        if key not in self._block_by_key:
            self._block_by_key[key] = block
            self.keys[block] = key

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference to each block."""
        for block in reversed(table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self._free[block] = None
                if self.keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self.keys[block]
        if key is not None:
            del self._block_by_key[key]
            self.keys[block] = None
        self.refs[block] = 1
        return block
