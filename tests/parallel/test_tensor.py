"""Runs whose layers are divided among ranks have the bits of a run in one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.nn import Activation, BatchLayout, Decoder, DecoderConfig, DenseConfig, MoEConfig
from ingot.nn.config import QkNorm
from ingot.nn.formats import Int8
from ingot.nn.quantized import quantize_
from ingot.ops.inputs import TensorMaker
from ingot.parallel import tensor
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks, row_slice, sent_bytes
from ingot.parallel.shard import cut_rows
from ingot.parallel.tensor import check_divisible, divide_decoder, take_rows
from ingot.training.precision import Precision
from tests.parallel import comparison
from tests.parallel.comparison import DIVIDED, LLAMA_70B, Jobs, compare
from tests.parallel.processes import run_ranks
from tests.training import runs

CASES = ["divided", "divided-gpt2"]
TP = {"tp": 2}
JOBS: Jobs = {
    1: [{"name": "one", "cases": CASES, "steps": 4}],
    2: [
        {"name": "2-tp", "cases": CASES[1:], "steps": 4, "parallel": TP},
        {"name": "continued", "cases": CASES[:1], "steps": 4, "parallel": TP, "stop": 2},
        {"name": "wrong", "cases": CASES[:1], "steps": 4, "parallel": TP, "partial_sums": True},
    ],
    4: [
        {"name": "2x2", "cases": CASES, "steps": 4, "parallel": TP, "recompute": "selective"},
        {
            "name": "4-tp",
            "cases": CASES[:1],
            "steps": 4,
            "parallel": {"tp": 4},
            "recompute": "full",
        },
    ],
    0: [{"name": "continued", "cases": CASES[:1], "steps": 4, "resume": True}],
}
TRAIN = f"{__name__}:train_all"


def train_all(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    for activation in (Activation.SWIGLU, Activation.GELU):
        assert different_gradients(ranks, activation) == []
        with partial_sums(torch.float32):
            assert different_gradients(ranks, activation)
    for job in options["jobs"]:
        with partial_sums(torch.bfloat16) if job.get("partial_sums") else nullcontext():
            comparison.train_all(ranks, {"jobs": [job]}, directory)


def block_config(activation: Activation) -> DecoderConfig:
    bias = activation is Activation.GELU
    sizes = {"dim": 264, "heads": 16, "kv_heads": 8, "head_dim": 24, "ffn_dim": 840}
    options = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "activation": activation}
    return replace(DIVIDED, layers=1, **sizes, **options)


def different_gradients(ranks: Ranks, activation: Activation) -> list[str]:
    """Which gradients of a block's weights and input are not those of the undivided block."""
    config = block_config(activation)
    wanted = gradients(Decoder.from_config(config, seed=0, dtype=torch.bfloat16))
    model = Decoder.from_config(config, seed=0, dtype=torch.bfloat16)
    rows = divide_decoder(model, ranks)
    wanted |= {name: take_rows(wanted[name], own) for name, own in rows.items()}
    found = gradients(model)
    assert wanted.keys() == found.keys()
    return [name for name, grad in wanted.items() if not torch.equal(grad, found[name])]


def check_usual(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    """Partial sums are as precise as the sums of one process, and fewer bytes are sent."""
    for activation in (Activation.SWIGLU, Activation.GELU):
        config = block_config(activation)
        plain, truth = (
            gradients(Decoder.from_config(config, seed=0, dtype=torch.bfloat16).to(dtype))
            for dtype in (torch.bfloat16, torch.float64)
        )
        sent: dict[bool, int] = {}
        for bitwise in (True, False):
            model = Decoder.from_config(config, seed=0, dtype=torch.bfloat16)
            rows = divide_decoder(model, ranks, bitwise=bitwise)
            before = sent_bytes()
            found = gradients(model)
            sent[bitwise] = sent_bytes() - before
            differing: list[str] = []
            for name, value in found.items():
                own, exact = (
                    take_rows(v[name], rows[name]) if name in rows else v[name]
                    for v in (plain, truth)
                )
                differing += [] if torch.equal(value, own) else [name]
                assert (value - exact).norm() <= 1.25 * (own - exact).norm(), name
            assert bool(differing) is not bitwise
        assert sent[False] < 0.7 * sent[True], sent


def gradients(model: Decoder) -> dict[str, Tensor]:
    """The gradients of all weights of a block and of its input, and its output."""
    make = TensorMaker(torch.bfloat16, seed=1)
    x, grad = (make(333, model.config.dim).to(model.dtype) for _ in range(2))
    x.requires_grad_()
    y = model.blocks[0](x, BatchLayout.packed([200, 133]))
    y.backward(grad)
    named = model.blocks.named_parameters(prefix="blocks")
    return {"x": x.grad, "y": y.detach(), **{name: p.grad for name, p in named}}  # pyright: ignore


@contextmanager
def partial_sums(dtype: torch.dtype) -> Generator[None]:
    """Compute dx in the usual way: each rank sums over its own rows, and the sums are added."""

    def input_grad(
        ranks: Ranks,
        widths: Sequence[int],
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        like: Tensor,
    ) -> Tensor:
        total = torch.zeros(len(like), weights[0].shape[1], dtype=dtype)
        for grad, weight in zip(grads, weights, strict=True):
            ranges = grad.split([width * ranks.size for width in widths], 1)
            own = torch.cat([tensor._own_columns(some, ranks) for some in ranges], 1)
            total += own.to(dtype) @ weight.to(dtype)
        dist.all_reduce(total, group=ranks.group)
        return tensor._own_columns(total, ranks).to(like.dtype)

    before, tensor._input_grad = tensor._input_grad, input_grad
    try:
        yield
    finally:
        tensor._input_grad = before


def test_divided_layers_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Also with FSDP, recomputation, and several micro-batches in a shard of the batch."""
    compared = compare(JOBS, tmp_path, TRAIN)
    assert compared.pop(("wrong", "divided"))  # sums that ranks divide are noticed
    assert compared == {key: [] for key in compared}
    assert len(compared) == 5


@pytest.mark.parametrize("size", [2, 4])
def test_the_usual_mode_is_as_precise_as_one_process_and_sends_less(
    size: int, tmp_path: Path
) -> None:
    run_ranks(size, f"{__name__}:check_usual", {}, tmp_path)


def test_a_run_in_the_usual_mode_is_nearly_that_of_one_process(tmp_path: Path) -> None:
    """Also in float32, which only this mode divides, and with FSDP."""
    usual = {"tp": 2, "tp_bitwise": False}
    case: dict[str, Any] = {"cases": ["divided-float32"], "steps": 4}
    comparison.train_all(Ranks(), {"jobs": [{"name": "one", **case}]}, tmp_path)
    jobs = [{"name": "usual", "parallel": usual, **case}]
    run_ranks(4, f"{comparison.__name__}:train_all", {"jobs": jobs}, tmp_path)
    one, divided = (
        [row[1:3] for row in runs.curve(tmp_path / name / "divided-float32") if row[1]]
        for name in ("one", "usual")
    )
    assert len(one) == 4
    for of_one, found in zip(one, divided, strict=True):
        assert found == pytest.approx(of_one, rel=1e-6)
    assert divided != one  # the gradient norms


@pytest.mark.slow
def test_thirty_steps_on_two_and_four_ranks(tmp_path: Path) -> None:
    """All layouts and recomputation policies; and a run that is divided differently twice."""
    shared = {"cases": CASES, "steps": 30}
    jobs: Jobs = {1: [{"name": "one", **shared}], 8: [], 4: [], 2: []}
    for size, tp, dp in ((8, 4, 1), (8, 2, 2), (4, 2, 1), (4, 2, 2), (4, 4, 1)):
        layout = {"parallel": {"tp": tp, "dp": dp}}
        jobs[size].append({"name": f"{size}-{tp}-tp-{dp}-dp", **layout, **shared})
    for policy in ("none", "selective", "full"):
        jobs[2].append({"name": policy, "parallel": TP, "recompute": policy, **shared})
    changed = {"name": "changed", **shared}
    jobs[4].append({**changed, "parallel": TP, "stop": 10})
    jobs[2].append({**changed, "parallel": TP, "stop": 20, "resume": True})
    jobs[0] = [{**changed, "resume": True}]
    compared = compare(jobs, tmp_path, TRAIN)
    assert compared == {key: [] for key in compared}
    assert len(compared) == 9 * len(CASES)


def test_all_ranks_together_have_every_row_once() -> None:
    """Of the layers of 70 billion weights, divided among 8 ranks, each sharded over 128."""
    config = replace(LLAMA_70B, layers=1)
    whole = {name: len(p) for name, p in Decoder.on_meta(config).named_parameters()}
    found: dict[str, list[slice]] = {}
    for rank in range(8):
        for name, rows in divide_decoder(Decoder.on_meta(config), Ranks(rank, 8)).items():
            count = sum(some.stop - some.start for some in rows)
            for shard in range(128):
                found.setdefault(name, []).extend(cut_rows(rows, row_slice(count, shard, 128)))
    assert len(found) == 5
    for name, rows in found.items():
        rows.sort(key=lambda some: some.start)
        assert [0, *(some.stop for some in rows)] == [*(some.start for some in rows), whole[name]]


def test_models_that_cannot_be_divided_are_an_error() -> None:
    moe = MoEConfig(num_experts=2, top_k=1, ffn_dim=48)
    for config, size, message in (
        (DenseConfig(in_features=2, hidden_dims=(8,), out_features=2), 2, "only decoders"),
        (replace(DIVIDED, moe=moe), 2, "models with moe"),
        (replace(DIVIDED, qk_norm=QkNorm.PER_HEAD), 2, "models with qk_norm"),
        (DIVIDED, 8, "must divide the model's kv_heads, 4, got 8"),
        (replace(DIVIDED, ffn_dim=77), 2, "must divide the model's ffn_dim, 77, got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_divisible(config, size)
    check_divisible(DIVIDED, 4)
    decoder = Decoder.from_config(DIVIDED, seed=0, dtype=torch.bfloat16)
    quantize_(decoder, lambda name: Int8())
    with pytest.raises(ConfigError, match="quantized weights cannot be divided"):
        divide_decoder(decoder, Ranks(0, 2))


def test_recipes_that_cannot_be_divided_are_an_error(tmp_path: Path) -> None:
    """In float32, the bits of MKL's GEMMs depend on the number of rows of a weight."""
    bf16 = {"model": DIVIDED, "precision": Precision.BF16}
    tp = {"parallel": ParallelConfig(tp=2)}
    runs.text(tmp_path, **bf16, **tp).check_ranks(2)
    float32 = runs.text(tmp_path, model=DIVIDED, **tp)
    float32.check_ranks(1)
    with pytest.raises(ConfigError, match="needs precision=bf16"):
        float32.check_ranks(2)
    with pytest.raises(ConfigError, match="must divide the model's kv_heads, 1, got 2"):
        runs.text(tmp_path, precision=Precision.BF16, **tp).check_ranks(2)
