from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from ingot.bench.workloads import (
    DTYPES,
    WORKLOADS,
    Views,
    Workload,
    arena_size,
    argument_sets,
    floats,
    new_arena,
    select_workloads,
)
from ingot.core import device
from ingot.core.errors import UnknownName
from ingot.ops import registry

ARENA = new_arena(2**24)

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def shapes(op: str, dtype: str) -> set[str]:
    return {
        workload.shape for workload in WORKLOADS if (workload.op, workload.dtype) == (op, dtype)
    }


def test_every_op_has_distinct_workloads() -> None:
    assert {workload.op for workload in WORKLOADS} == set(registry())
    names = [(workload.op, workload.shape, workload.dtype) for workload in WORKLOADS]
    assert len(names) == len(set(names))


def test_linear_covers_all_projections_and_batch_sizes() -> None:
    rows = (1, 2, 4, 8, 16, 64, 128, 512, 2048)
    projections = ((1280, 768), (4096, 768), (768, 2048), (32000, 768), (1728, 576), (49152, 576))
    wanted = {f"{m}x{k}x{n}" for m, (n, k) in product(rows, projections)}
    epilogues = {f"{m}x768x2048 {act}" for m in (8, 512) for act in ACTIVATIONS}
    epilogues |= {f"{m}x2048x768 residual" for m in (8, 512)}
    epilogues |= {f"{m}x768x2048 lora" for m in (8, 512)}
    assert shapes("linear", "bf16") == wanted | epilogues


@pytest.mark.parametrize("op", sorted(set(registry()) - {"philox_uniform"}))
def test_ops_are_timed_at_decode_and_training_sizes(op: str) -> None:
    if not op.startswith(("linear", "gated", "grouped")):
        assert shapes(op, "bf16") == shapes(op, "fp32")
    once = (
        "sample",
        "sampling_logprobs",
        "apply_penalties",
        "linear_cross_entropy",
        "linear_token_logprobs",
    )
    once += ("linear_cross_entropy_fwd_bwd",)
    assert len(shapes(op, "bf16")) >= (1 if op in once else 2)


def test_every_workload_is_a_valid_call() -> None:
    arena = new_arena(2**27)
    for workload in WORKLOADS:
        op = registry()[workload.op]
        views = Views(arena, DTYPES[workload.dtype], at=0)
        args = workload.make_args(views)
        op.check(*op.with_defaults(args))
        assert op.cost(*args).bytes > 0
        if workload.sdpa:  # the same bytes, so that both walk through the arena alike
            others = Views(arena, DTYPES[workload.dtype], at=0)
            workload.sdpa(others)
            assert others.taken == views.taken


def test_workloads_are_selected_by_op_or_family() -> None:
    assert len(select_workloads()) == len(WORKLOADS)
    assert {w.op for w in select_workloads(["NORM"])} == {
        op.name for op in registry().values() if op.family == "norm"
    }
    embeddings = {op.name for op in registry().values() if op.family == "embedding"}
    assert {w.op for w in select_workloads(["silu", "embedding"])} == {"silu", *embeddings}


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'rms_norm'"):
        select_workloads(["silu", "rmsnorm"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arena_is_normally_distributed_in_every_dtype(dtype: torch.dtype) -> None:
    values = ARENA.view(dtype).double()
    assert values.isfinite().all()
    assert values.mean().abs() < 0.01
    assert values.std() == pytest.approx(0.5, rel=0.02)


def test_arena_repeats_after_32_mib() -> None:
    arena = new_arena(2**25 + 2**12)
    assert len(arena) == 2**25 + 2**12
    assert torch.equal(arena[: 2**12], arena[2**25 :])


def test_views_are_consecutive_and_wrap_around() -> None:
    views = Views(ARENA, torch.float32, at=2**24 - 256)
    places = [views(10).data_ptr() - ARENA.data_ptr() for _ in range(5)]
    assert places == [2**24 - 256, 2**24 - 192, 2**24 - 128, 2**24 - 64, 0]
    assert views.taken == 200


@pytest.mark.parametrize(("rows", "step"), [(1024, 2**18), (1000, 256_000), (4, 2**16)])
def test_arguments_cover_the_whole_arena(rows: int, step: int) -> None:
    args = argument_sets(Workload("silu", "", "fp32", floats((rows, 64))), ARENA)
    places = [x.data_ptr() - ARENA.data_ptr() for (x,) in args]
    assert places == [step * n for n in range(len(args))]
    assert 2**24 - 2 * step <= places[-1] <= 2**24 - step


def test_embedding_advances_by_the_rows_it_reads() -> None:
    workload = Workload("embedding", "", "fp32", lambda new: (new.ints(4096, 64), new(4096, 512)))
    args = argument_sets(workload, ARENA)
    assert len(args) > 2**24 // (4096 * 512 * 4)  # more calls than tables that fit
    assert not torch.equal(args[0][0], args[1][0])


def test_arguments_outside_the_arena_are_made_once() -> None:
    (uniform,) = select_workloads(["philox_uniform"])
    assert len(argument_sets(uniform, ARENA)) == 1


@pytest.mark.parametrize(
    ("memory", "l3", "size"),
    [
        (2**35, 2**25, 2**29),  # an ordinary machine
        (2**35, 2**28, 2**30),  # a large cache
        (2**35, None, 2**29),
        (2**30, 2**28, 2**27),  # little memory
    ],
)
def test_arena_size_is_between_caches_and_memory(memory: int, l3: int | None, size: int) -> None:
    here = device.detect()
    assert arena_size(replace(here, memory=memory, cpu=replace(here.cpu, l3=l3))) == size
