"""All ranks of large layouts: what they store, save and send to each other fits together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.nn import Decoder
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks
from ingot.parallel.shard import ShardedModel, local
from ingot.training.checkpoint import _group_rows
from ingot.training.recipe import Recipe, load_datasets
from ingot.training.trainer import Trainer
from tests.parallel import comparison
from tests.parallel.simulation import Collective, Program, Receive, Send, find_deadlock, simulate
from tests.training import runs

# Every axis, with others that it can be combined with; the remaining ranks shard the weights.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("dense", {}),
    "dp x tp": ("divided", {"dp": 2, "tp": 2}),
    "usual tp": ("divided", {"tp": 4, "tp_bitwise": False}),
    "pp": ("staged-dense", {"pp": 4}),
    "pp x dp x tp": ("staged-divided", {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved_1f1b"}),
    "zero bubble": ("staged-moe", {"pp": 2, "schedule": "interleaved_zero_bubble"}),
    "cp": ("grouped-heads", {"cp": 2, "dp": 2}),
    "ep": ("experts", {"ep": 8}),
    "int8": ("int8", {"dp": 2, "grad_compression": "int8"}),
    "DiLoCo": ("dense", {"dp": 2, "local_steps": 2}),
}


def recipe_of(case: str, layout: dict[str, Any], size: int, directory: Path) -> Recipe:
    """Each rank has as many micro-batches as a pipeline needs, and at least two."""
    layout = {"pp": 1, "cp": 1, "tp": 1, **layout}
    data = size // (layout["pp"] * layout["cp"] * layout["tp"])
    if "ep" in layout:  # the experts divide 8 ranks
        layout["dp"] = data // layout["ep"]
    batch = {"global_batch_size": 4 * data, "grad_accum_steps": 4 * data}
    parallel = ParallelConfig(batch_shards=2 * data, **layout)
    options = {**comparison.CASES[case], **batch, "parallel": parallel, "clip": comparison.CLIP}
    return runs.text(directory, **options)


def train(recipe: Recipe, size: int, directory: Path) -> tuple[list[Program], list[dict[str, Any]]]:
    """A step, an evaluation and a checkpoint on all ranks; what each sends, and what it saves."""
    datasets = load_datasets(recipe.data)
    saved: list[dict[str, Any]] = []

    def run(ranks: Ranks) -> None:
        trainer = Trainer(recipe, directory / "run", ranks=ranks, datasets=datasets)
        trainer._metrics = None
        for _ in range(recipe.parallel.local_steps):
            trainer.run_step()
        trainer._evaluate()
        saved.append(
            {
                f"{part}/{name}": tensor.to("meta")
                for part, tensors in trainer._tensors().items()
                for name, tensor in tensors.items()
            }
        )

    return simulate(size, run), saved


def check_saved(saved: list[dict[str, Tensor]], whole: dict[str, torch.Size]) -> None:
    """The ranks save every row of every tensor once, and each about as much."""
    sizes: dict[str, list[int]] = defaultdict(list)
    by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensors in saved:
        for base, slices in _group_rows(tensors).items():
            for name, rows in slices:
                is_whole = name == base
                by_name[base].append((0, 1) if is_whole else (rows.start, rows.stop))
                own = tensors[name].shape
                assert own[1:] == whole[base][1:]
                assert is_whole or own[0] == rows.stop - rows.start
                sizes[base].append(1 if is_whole else own[0])
    assert by_name.keys() == whole.keys()
    for name, rows in by_name.items():
        rows.sort()
        ends = [0, *(stop for _, stop in rows)]
        assert ends == [*(start for start, _ in rows), ends[-1]], name
        assert rows == [(0, 1)] or ends[-1] == whole[name][0], name


def check(layout: str, size: int, directory: Path) -> None:
    case, options = LAYOUTS[layout]
    programs, saved = train(recipe_of(case, options, size, directory), size, directory)
    assert all(programs)
    assert find_deadlock(programs) is None
    if "local_steps" in options:  # each replica saves its own
        return
    alone = Trainer(recipe_of(case, {}, 1, directory), directory / "one")
    alone._metrics = None
    alone.run_step()
    parts = alone._tensors().items()
    check_saved(saved, {f"{part}/{n}": t.shape for part, ts in parts for n, t in ts.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_fit_together(layout: str, tmp_path: Path) -> None:
    check(layout, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1024_ranks_fit_together(layout: str, tmp_path: Path) -> None:
    check(layout, 1024, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 8)])
def test_each_of_1024_ranks_stores_its_rows_of_wide_layers(dp: int, tp: int) -> None:
    """Of four layers of 70 billion weights; a rank has its part of the memory, and every row has as
    many owners as there are replicas."""
    config = replace(comparison.LLAMA_70B, layers=4)
    stored: dict[str, list[tuple[int, int]]] = defaultdict(list)
    sizes: list[int] = []

    def run(ranks: Ranks) -> None:
        model = Decoder.on_meta(config, torch.bfloat16)
        mesh = Mesh.build(ranks, ParallelConfig(dp=dp, tp=tp))
        sharded = ShardedModel(model, mesh, lambda name, grad: None)
        for name, parameter in model.named_parameters():
            rows = sharded.rows(name)
            assert len(local(parameter)) == sum(some.stop - some.start for some in rows)
            if sharded.owns(name):
                stored[name] += [(some.start, some.stop) for some in rows]
        sizes.append(sum(local(p).nbytes for p in model.parameters()))

    simulate(1024, run)
    shapes = {name: p.shape for name, p in Decoder.on_meta(config).named_parameters()}
    for name, shape in shapes.items():
        rows = sorted(some for some in stored[name] if some[0] < some[1])
        assert [0, *(b for _, b in rows)] == [*(a for a, _ in rows), shape[0]], name
    divided = sum(s.numel() for n, s in shapes.items() if "blocks" in n and "norm" not in n)
    every = sum(s.numel() for s in shapes.values()) - divided
    planned = 2 * (divided / (1024 // dp) + every / (1024 // dp // tp))
    assert max(sizes) <= 1.02 * planned


def faulty(fault: str, programs: list[Program]) -> None:
    """Change what one rank does."""
    program = programs[5]
    at = [i for i, step in enumerate(program) if isinstance(step, Collective)]
    of_two = next(i for i in at if program[i].ranks != program[at[0]].ranks)  # pyright: ignore
    if fault == "a collective is left out":
        del program[at[3]]
    elif fault == "collectives of two groups are exchanged":
        program[of_two - 1], program[of_two] = program[of_two], program[of_two - 1]
    elif fault == "another size":
        step = program[of_two]
        assert isinstance(step, Collective)
        program[of_two] = replace(step, signature=(torch.Size([7]), *step.signature[1:]))
    elif fault == "a message is not sent":
        program.remove(next(step for step in program if isinstance(step, Send)))
    else:
        end = next(i for i, step in enumerate(program) if isinstance(step, Receive))
        program.insert(0, program.pop(end))


@pytest.mark.parametrize(
    "fault",
    [
        "a collective is left out",
        "collectives of two groups are exchanged",
        "another size",
        "a message is not sent",
        "a message is awaited too early",
    ],
)
def test_ranks_that_wait_for_each_other_are_found(fault: str, tmp_path: Path) -> None:
    case, options = LAYOUTS["pp x dp x tp"]
    programs, _ = train(recipe_of(case, options, 16, tmp_path), 16, tmp_path)
    assert find_deadlock(programs) is None
    faulty(fault, programs)
    assert find_deadlock(programs)


class _CountGradients(TorchDispatchMode):
    """Counts the gradients that the backwards of ops are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("ingot::") and func.name().endswith("_backward"):
            self.count += sum(args[0])
        return func(*args, **(kwargs or {}))


def test_a_divided_backward_computes_each_gradient_once(tmp_path: Path) -> None:
    """Zero-bubble schedules compute those of inputs first and those of weights later."""
    counts: dict[str, int] = {}
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        layout = {"pp": 2, "schedule": schedule}
        recipe = recipe_of("staged-dense", layout, 2, tmp_path)
        recipe = replace(recipe, recompute="none")
        datasets = load_datasets(recipe.data)
        counter = _CountGradients()

        def run(ranks: Ranks) -> None:
            trainer = Trainer(recipe, tmp_path / "run", ranks=ranks, datasets=datasets)  # noqa: B023
            trainer._metrics = None
            with counter:  # noqa: B023
                trainer.run_step()

        simulate(2, run)
        counts[schedule] = counter.count
    assert counts["interleaved_1f1b"] == counts["interleaved_zero_bubble"] > 0
