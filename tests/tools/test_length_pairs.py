"""Pairs of short and long answers: as many as promised, the same each time."""

from __future__ import annotations

from pathlib import Path

from ingot.data import ChatRow, read_pairs
from tools import length_pairs


def test_the_chosen_answer_is_the_shorter_one(tmp_path: Path) -> None:
    length_pairs.main(tmp_path / "one")
    length_pairs.main(tmp_path / "two")
    prompts: set[str] = set()
    for name, count in (("train", 200), ("validation", 50)):
        path = tmp_path / "one" / f"{name}.jsonl"
        assert path.read_bytes() == (tmp_path / "two" / f"{name}.jsonl").read_bytes()
        pairs = list(read_pairs(path))
        assert len(pairs) == count
        for pair in pairs:
            assert isinstance(pair.chosen, ChatRow)
            assert isinstance(pair.rejected, ChatRow)
            short, long = (row.messages[-1]["content"] for row in (pair.chosen, pair.rejected))
            assert short in long
            assert len(long) > 2 * len(short)
            prompts.add(pair.chosen.messages[1]["content"].split("`")[1])
    assert len(prompts) == 250  # validation is about other functions
