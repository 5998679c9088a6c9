"""The memory for keys and values, as numbered blocks: who uses which, and what is in them.

A block holds `size` tokens of one sequence. The pool knows no tensors: block 7 is page 7 of the
runner's `KVCache`. A full block is given a key, which stands for its content:

    root(adapter, weights, salt)   SHA-256 of the three
    key(parent, tokens)            SHA-256 of the key before and of this block's tokens

so a key stands for every token from the sequence's start on, for the weights that computed them
and for the tenant who may know. SHA-256, because whoever finds two prompts of the same key reads
another's cache. Equal keys are equal bits, as the kernels are exact; a block with a key is never
written again.

A block is *used* (it is in the tables of `refs` sequences) or *free*. A free block keeps its key
until it is needed for something else, so a sequence that ended is a cache for the next. First go
free blocks without a key, then the least recently used; within a sequence the last block goes
first, since without the blocks before it a block cannot be found.

All operations take O(1) time a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import pack


def root(adapter: str, weights: str, salt: bytes) -> bytes:
    """The parent of a sequence's first block.

    >>> root("", "v1", b"alice") == root("", "v1", b"bob")
    False
    """
    parts = (adapter.encode(), weights.encode(), salt)
    return sha256(b"".join(pack("<Q", len(part)) + part for part in parts)).digest()


def key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block.

    >>> key(root("", "v1", b""), (1, 2, 3, 4)).hex()[:8]
    '7d8ef086'
    """
    return sha256(parent + pack(f"<{len(tokens)}I", *tokens)).digest()


class BlockPool:
    """Blocks, their users and their keys.

    >>> pool = BlockPool(4)
    >>> table = pool.allocate(3)
    >>> table, pool.allocate(2), pool.free
    ((0, 1, 2), None, 1)
    >>> pool.seal(table[0], b"key of block 0")
    >>> pool.release(table)
    >>> pool.free, pool.find([b"key of block 0", b"another"])
    (4, (0,))
    """

    def __init__(self, count: int) -> None:
        self.refs = [0] * count
        self.keys: list[bytes | None] = [None] * count
        self._of_key: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """How many blocks nobody uses; some of them may be cached."""
        return len(self._free)

    def find(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The blocks of the first keys, up to one that is not there. They are not yet used."""
        found: list[int] = []
        for wanted in keys:
            block = self._of_key.get(wanted)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def allocate(self, count: int, shared: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Use these blocks that `find` found and `count` others; or None, and nothing changed."""
        refs, free = self.refs, self._free
        if count + sum(not refs[block] for block in shared) > len(free):
            return None
        for block in shared:
            if not refs[block]:
                del free[block]
            refs[block] += 1
        return shared + tuple([self._take() for _ in range(count)])

    def seal(self, block: int, content: bytes) -> None:
        """Say that the block is full, and of what. Where another holds the same, that one stays
        the cached one."""
        if self.keys[block] is not None or not self.refs[block]:
            raise ValueError(f"block {block} has a key already, or nobody uses it")
        if content not in self._of_key:
            self._of_key[content] = block
            self.keys[block] = content

    def release(self, table: Sequence[int]) -> None:
        """Use these blocks no more."""
        for block in reversed(table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self._free[block] = None
                if self.keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        content = self.keys[block]
        if content is not None:
            del self._of_key[content]
            self.keys[block] = None
        self.refs[block] = 1
        return block
