"""Streams are functions of their keys, and no two keys share one."""

from __future__ import annotations

import itertools

import numpy as np

from ingot.core.random import Purpose, philox_generator


def test_a_stream_can_be_entered_anywhere() -> None:
    whole = philox_generator(Purpose.DROPOUT, seed=1, step=2, index=3).random_raw(400)
    for start in (0, 1, 7, 99):
        part = philox_generator(Purpose.DROPOUT, seed=1, step=2, index=3, start=start).random_raw(4)
        assert np.array_equal(part, whole[4 * start : 4 * start + 4])


def test_every_part_of_the_key_matters() -> None:
    keys = itertools.product(Purpose, (0, 1), (0, 1), (0, 1))
    words = [
        tuple(philox_generator(p, seed=s, step=t, index=i).random_raw(64)) for p, s, t, i in keys
    ]
    assert len({word for stream in words for word in stream}) == 64 * len(words)


def test_it_is_philox() -> None:
    """Known answers of the paper's own code for a counter and a key of zeros: kat_vectors."""
    # numpy raises the counter by one first, so the counter before 0 is all ones.
    stream = np.random.Philox(key=0, counter=2**256 - 1)
    assert [hex(int(word)) for word in stream.random_raw(4)] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]
