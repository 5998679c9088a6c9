from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.serving.engine.blocks import BlockPool, block_key, root_key


def state(pool: BlockPool) -> tuple[object, ...]:
    return list(pool.refs), list(pool.keys), list(pool._free), dict(pool._block_by_key)


def sealed(pool: BlockPool, count: int, name: str) -> tuple[int, ...]:
    """Some blocks in use, with keys."""
    table = pool.allocate(count)
    assert table is not None
    for index, block in enumerate(table):
        pool.seal(block, f"{name}{index}".encode())
    return table


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(count)]


@pytest.mark.parametrize("cached", [False, True])
def test_too_little_changes_nothing(cached: bool) -> None:
    pool = BlockPool(5)
    pool.release(sealed(pool, 3, "a"))
    found = pool.find_cached(keys("a", 3)) if cached else ()
    before = state(pool)
    assert pool.allocate(6 - len(found), found) is None
    assert state(pool) == before
    assert pool.allocate(5 - len(found), found) is not None
    assert pool.num_free == 0


def test_first_go_blocks_without_a_key_then_the_least_recently_used_from_their_ends() -> None:
    pool = BlockPool(6)
    old, new, plain = sealed(pool, 2, "a"), sealed(pool, 2, "b"), pool.allocate(2)
    assert plain
    for table in (old, new, plain):
        pool.release(table)
    assert pool.allocate(2) in (plain, plain[::-1])
    assert pool.allocate(1) == old[1:]
    assert pool.find_cached(keys("a", 2)) == old[:1]
    assert pool.allocate(1) == old[:1]
    assert pool.find_cached(keys("b", 2)) == new


def test_a_block_used_again_is_recent_again() -> None:
    pool = BlockPool(2)
    a, b = sealed(pool, 1, "a"), sealed(pool, 1, "b")
    pool.release(a)
    pool.release(b)
    assert pool.allocate(0, a) == a
    pool.release(a)
    assert pool.allocate(1) == b


def test_of_two_blocks_of_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = sealed(pool, 1, "a"), sealed(pool, 1, "a")
    assert pool.find_cached(keys("a", 1)) == first
    assert pool.keys[second[0]] is None


def test_a_block_is_sealed_once_and_by_its_user() -> None:
    pool = BlockPool(2)
    (block,) = sealed(pool, 1, "a")
    for wrong in (block, 1 - block):
        with pytest.raises(ValueError, match="is sealed already, or free"):
            pool.seal(wrong, b"b")


parts = st.tuples(st.text(max_size=3), st.text(max_size=3), st.binary(max_size=3))


@given(parts, parts)
def test_different_origins_have_different_roots(
    one: tuple[str, str, bytes], two: tuple[str, str, bytes]
) -> None:
    assert (root_key(*one) == root_key(*two)) == (one == two)


tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3)


@given(tokens, tokens)
def test_different_tokens_have_different_keys(one: list[int], two: list[int]) -> None:
    assert (block_key(b"p" * 32, one) == block_key(b"p" * 32, two)) == (one == two)
    assert block_key(b"p" * 32, one) != block_key(b"q" * 32, one)
