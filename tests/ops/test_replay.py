from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.inputs import TensorMaker
from ingot.ops.replay import CudaGraphReplay, Replay, capture

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

MAKE = TensorMaker(torch.bfloat16)
X, RESIDUAL = MAKE(3, 32), MAKE(3, 24)
WEIGHT, BACK, NORM, BIAS = MAKE(24, 32), MAKE(32, 24), MAKE(24), MAKE(24)


def views(x: Tensor) -> list[Tensor]:
    return [
        x[:, :16],
        x[1:],
        x.view(3, 2, 16)[:, 1],
        x.view(3, 2, 16).transpose(0, 1)[0],
        x.split([16, 16], dim=1)[1],
        x.flatten()[8:40].view(2, 16),
        x.unbind(0)[1][None, :16],
        x.unsqueeze(0)[0, ::2],
    ]


@given(st.integers(0, 7), st.integers(0, 2**20))
def test_replay_equals_the_function_on_new_values(which: int, seed: int) -> None:
    x = X.clone()

    def function() -> Tensor:
        h = ops.linear(x, WEIGHT, BIAS if which % 2 else None, 0, RESIDUAL)
        h = ops.rms_norm(h, NORM, 1e-5)
        y = ops.linear(h, BACK)
        return ops.gelu(views(y)[which])

    with torch.inference_mode():
        first, again = capture(function)
        assert isinstance(again, Replay)
        assert torch.equal(first, function())
        for step in range(2):
            x.copy_(TensorMaker(torch.bfloat16, seed=seed + step)(3, 32))
            assert torch.equal(again(), function())


def test_replay_writes_into_mutated_arguments() -> None:
    q, k, v = MAKE(1, 2, 8), MAKE(1, 1, 8), MAKE(1, 1, 8)
    pools = MAKE(2, 4, 1, 8), MAKE(2, 4, 1, 8)
    position, slot = torch.tensor([3]), torch.tensor([5])
    freqs = ops.rope_frequencies(8)[0]
    with torch.inference_mode():
        _, again = capture(lambda: ops.rope_and_cache(q, k, v, position, freqs, *pools, slot))
        assert isinstance(again, Replay)
        slot.fill_(2)
        again()
    assert torch.equal(pools[1][0, 2], v[0])
    assert torch.equal(pools[0][0, 2], pools[0][1, 1])


def reads_a_value() -> Tensor:
    return ops.silu(X) if int(ops.silu(X).argmax()) else ops.gelu(X)


def adds() -> Tensor:
    return ops.silu(X) + 1


def writes_in_place() -> Tensor:
    return ops.silu(X).mul_(2)


def computes_nothing() -> Tensor:
    return X


@pytest.mark.parametrize("function", [reads_a_value, adds, writes_in_place, computes_nothing])
def test_functions_that_cannot_be_captured_run_in_python(function: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        first, again = capture(function)
    assert again is function
    assert torch.equal(first, function())


def test_replay_raises_errors_of_the_calls() -> None:
    tokens = torch.tensor([1])
    with torch.inference_mode():
        _, again = capture(lambda: ops.embedding(tokens, WEIGHT))
        assert isinstance(again, Replay)
        tokens.fill_(99)
        with pytest.raises(RuntimeError):
            again()
        tokens.fill_(2)
        assert torch.equal(again()[0], WEIGHT[2])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "give 1",
        "give -1",
        "nonsense",
        "free 1 0 give 0",
        "view 0 1 2",
        "view 0 99999999 1 1 0 1 give 1",
        "view 7 1 2 1 0 1 give 1",
        "call ingot::silu - 1 t 4 1 1 give 1",
        "call ingot::silu - 99999999 t 0",
        "call ingot::silu - 1 t 0 1 1 free 1 1 give 1",
        "call ingot::silu - 1 t 0 1 -5 give 0",
        "call ingot::silu - 1 t 0 1 99999999999 give 0",
    ],
)
def test_invalid_programs_raise(text: str) -> None:
    capture(lambda: ops.silu(X))  # loads it
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.ops.ingot_replay.make(text, [X])


def test_dropped_program_cannot_run() -> None:
    with torch.inference_mode():
        _, again = capture(lambda: ops.silu(X))
    assert isinstance(again, Replay)
    number = again._number  # pyright: ignore[reportPrivateUsage]
    del again
    with pytest.raises(RuntimeError, match="unknown program"):
        torch.ops.ingot_replay.run(number)


def test_cuda_graphs_are_launched_by_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stubs for torch's graphs, since this has not run on a GPU: the captured call computes
    nothing, and its result is there after the launch."""
    launches: list[str] = []
    x = torch.zeros(2)

    class Graph:
        def replay(self) -> None:
            launches.append("launch")

    @contextmanager
    def graph(graph: Graph, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        launches.append("capture")
        yield

    stubs = {
        "CUDAGraph": Graph,
        "graph": graph,
        "device": nullcontext,
        "Stream": lambda device: device,
        "graph_pool_handle": lambda: 1,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    result, again = capture(lambda: x, torch.device("cuda", 0))
    assert result is x
    assert again() is x
    assert isinstance(again, CudaGraphReplay)
    assert launches == ["capture", "launch", "launch"]


def test_function_that_a_cuda_graph_cannot_hold_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    x = torch.zeros(2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fail)

    def function() -> torch.Tensor:
        return x

    result, again = capture(function, torch.device("cuda", 0))
    assert result is x
    assert again is function
