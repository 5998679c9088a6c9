"""Models of transformers through the backend, with Inductor for what is left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ingot
from ingot.fuse import backend
from ingot.fuse.backend import Optimized, compile_graph, rewrite_graph
from ingot.fuse.report import recent, record
from tests.fuse import hf_models

X = torch.ones(2, 8)
QUICK = {("gpt2", torch.float32), ("llama", torch.bfloat16)}


def relative(found: Tensor, truth: Tensor) -> float:
    error = (found.detach().double() - truth.detach()).abs().max()
    return float(error / truth.detach().abs().max().clamp(min=1e-9))


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    seed = torch.Generator().manual_seed(2)
    out.backward(torch.randn(out.shape, generator=seed, dtype=torch.float64).to(out.dtype))
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def composed_bound(model: Any, dtype: torch.dtype) -> float:
    """One rounding for each of the calls that follow one another, within the records' tolerance."""
    return 3.0 * 16 * hf_models.num_layers(model) * torch.finfo(dtype).eps


# Makes every rewrite that matches, whether it pays here or not.
compile_always = partial(compile_graph, always=True)


CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.slow)
    for name in hf_models.NAMES
    for dtype in (torch.float32, torch.bfloat16)
]


KEPT = {
    "gpt2": {"attention": 2, "linear": 9, "layer_norm": 5},
    "llama": {"attention": 2, "linear": 15, "rms_norm": 5, "embedding": 1},
    "qwen2": {"attention": 2, "linear": 15, "rms_norm": 5, "embedding": 1},
    "bert": {"attention": 2, "linear": 12, "layer_norm": 5},
    "vit": {"attention": 2, "linear": 12, "layer_norm": 5},
    "t5": {"linear": 33, "rms_norm": 12},
    "whisper": {"attention": 4, "linear": 33},
    "resnet": {"linear": 1},
}


CONVOLUTIONS = "whisper", "resnet"
"""Models with convolutions for which PyTorch has a guard: fewer than 16 in a batch, or more."""


def to_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_outputs_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model, x = hf_models.build(name, dtype), hf_models.inputs(name, 2, 9, dtype)
    wide = hf_models.build(name, dtype).double()
    truth = wide(**to_double(x))[0]
    compiled = torch.compile(model, backend=compile_always, fullgraph=True)
    out = compiled(**x)[0]
    bound = composed_bound(model, dtype)
    assert relative(out, truth) < bound
    found, expected = gradients(model, out), gradients(wide, truth)
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for parameter, grad in expected.items():
        error = float((found[parameter].double() - grad).abs().max())
        assert error < 2 * bound * max(float(grad.abs().max()), 0.01 * largest), parameter
    report = recent()[-1]
    assert not report.dropped
    assert {op: report.kept[op] for op in KEPT[name]} == KEPT[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama", 20),
        *(pytest.param(name, 50, marks=pytest.mark.slow) for name in hf_models.NAMES),
    ],
)
def test_other_shapes_do_not_compile_again(name: str, count: int) -> None:
    torch._dynamo.reset()
    model, wide = hf_models.build(name), hf_models.build(name).double()
    with torch.no_grad():
        optimized = ingot.optimize(model, hf_models.inputs(name, 3, 11))
        assert isinstance(optimized, Optimized)
        random = torch.Generator().manual_seed(0)
        optimized(**hf_models.inputs(name, 2, 7))  # torch may compile once more
        if name in CONVOLUTIONS:
            optimized(**hf_models.inputs(name, 16, 7))
        graphs = len(optimized.report.graphs)
        for _ in range(count):
            batch, length = torch.randint(2, 24, (2,), generator=random).tolist()
            x = hf_models.inputs(name, batch, length)
            assert relative(optimized(**x)[0], wide(**to_double(x))[0]) < 1e-4
    assert len(optimized.report.graphs) == graphs <= 2 + (name in CONVOLUTIONS)


def run_always(module: fx.GraphModule, inputs: Any) -> Any:
    """Make every rewrite that matches, and run the result without Inductor."""
    record(rewrite_graph(module, inputs, always=True))
    return module.forward


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", run_always),
        pytest.param("llama", compile_always, marks=pytest.mark.slow),
        pytest.param("bert", compile_always, marks=pytest.mark.slow),
    ],
)
def test_padded_batches_keep_the_results_of_all_positions(name: str, backend: Any) -> None:
    torch._dynamo.reset()
    model, wide = hf_models.build(name), hf_models.build(name).double()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for batch, length in ((3, 11), (2, 8), (5, 13)):
        tokens = hf_models.inputs(name, batch, length)["input_ids"]
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        mask[1, :2] = 0
        truth = wide(tokens, attention_mask=mask)[0]
        out = compiled(tokens, attention_mask=mask)[0]
        assert relative(out, truth) < 1e-4
        found, expected = gradients(model, out), gradients(wide, truth)
        largest = max(float(grad.abs().max()) for grad in expected.values())
        for parameter, grad in expected.items():
            assert float((found[parameter].double() - grad).abs().max()) < 1e-4 * largest
    assert recent()[-1].kept["padded_attention"] == 2


def test_the_backend_has_a_name_and_chooses_by_cost() -> None:
    torch._dynamo.reset()
    model, x = hf_models.build("vit"), hf_models.inputs("vit", 2, 0)
    with torch.no_grad():
        out = torch.compile(model, backend="ingot")(**x)[0]
        assert relative(out, hf_models.build("vit").double()(**to_double(x))[0]) < 1e-4


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 8), (torch.ones(2, 8),), {"input": torch.ones(2, 8)}]
)
def test_example_inputs_are_an_argument_or_several(inputs: Any) -> None:
    model = nn.Linear(8, 8)
    optimized = ingot.optimize(model, inputs)
    torch.testing.assert_close(optimized(X), model(X))


def test_the_report_is_readable() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimized = ingot.optimize(model, (torch.ones(2, 8),))
    assert "graph 0: " in str(optimized.report)
    assert " x linear " in str(optimized.report)


def test_frozen_weights_compute_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        frozen = ingot.optimize(model, X, freeze=True)
        torch.testing.assert_close(frozen(X), model(X))


def test_frozen_weights_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], freeze: bool) -> Any:
        numbers.append(sum(isinstance(value, Tensor) for value in inputs))
        return module.forward

    monkeypatch.setattr(backend, "compile_graph", compile_graph)
    monkeypatch.setattr(backend, "recent", lambda: [None])
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for freeze in (False, True):
            torch._dynamo.reset()
            ingot.optimize(model, X, freeze=freeze)
    assert numbers == [3, 1]  # without freezing, the weight and the bias are inputs
