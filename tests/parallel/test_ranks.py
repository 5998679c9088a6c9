"""Sums over ranks in one order, computed by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ingot.core.errors import ConfigError
from ingot.parallel import ranks as collectives
from ingot.parallel.ranks import Ranks, all_reduce, connect, reduce_scatter, tree_sum
from tests.parallel.processes import run_ranks

SIZE = 4


def parts() -> list[torch.Tensor]:
    """What each rank adds: sums depend on the order in almost every element."""
    random = torch.Generator().manual_seed(0)
    return list(torch.randn(SIZE, 4 * 37, generator=random) * torch.logspace(-4, 4, 4 * 37))


def check_sums(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    given, rank = parts(), ranks.rank
    a, b, c, d = given
    wanted = (a + b) + (c + d)
    assert not torch.equal(wanted, ((a + b) + c) + d)
    rows = slice(37 * rank, 37 * (rank + 1))
    a, b, c, d = (part.bfloat16().float() for part in given)
    for collectives._SENT, collectives._SUMMED in ((37, 37), (37, 10), (20, 7)):
        assert torch.equal(reduce_scatter(given[rank], group), wanted[rows])
        halves = given[rank].bfloat16()
        assert torch.equal(reduce_scatter(halves, group), ((a + b) + (c + d))[rows])
    for length in (1, 3, 37, 148):  # also lengths that the ranks do not divide
        whole = given[rank][:length].clone()
        all_reduce(whole, group)
        assert torch.equal(whole, wanted[:length]), length
    assert ranks.gather([rank, 0.1 * rank]) == [[r, 0.1 * r] for r in range(SIZE)]
    assert ranks.max(torch.tensor([rank, -rank])).tolist() == [SIZE - 1, 0]
    assert ranks.sum_integers(torch.tensor([2**40 + rank])).tolist() == [SIZE * 2**40 + 6]
    assert ranks.share("main \u00e9" if ranks.is_main else "other") == "main \u00e9"
    ranks.barrier()


def test_sums_over_four_processes_are_those_of_the_tree(tmp_path: Path) -> None:
    run_ranks(SIZE, f"{__name__}:check_sums", {}, tmp_path)


def fail_on_one(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    assert ranks.rank != options["rank"], "planted"


def test_a_rank_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^rank 1: (?s:.)*planted") as caught:
        run_ranks(2, f"{__name__}:fail_on_one", {"rank": 1}, tmp_path)
    assert "rank 0" not in str(caught.value)


def test_a_single_process_needs_no_group() -> None:
    ranks = Ranks()
    values = torch.tensor([1.0, 2.0])
    assert ranks.max(values) is ranks.sum_integers(values) is values
    assert ranks.share("text") == "text"
    assert connect() == ranks


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_tree_of_parts(count: int) -> None:
    integers = [torch.tensor([float(i)]) for i in range(count)]
    assert tree_sum(integers).tolist() == [sum(range(count))]


@pytest.mark.parametrize("size", ["3", "6", "12"])
def test_the_number_of_ranks_is_a_power_of_two(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="power of two"):
        connect()
