"""Tests of dispatch: the order of providers and the contexts that change it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot import ops
from ingot.core.errors import UnknownName
from ingot.ops.dispatch import (
    BATCH_INVARIANT,
    PREFER_DEPTH,
    PREFERRED,
    batch_invariant,
    prefer,
    provider_names,
)


def test_providers_are_selected_by_priority() -> None:
    x = torch.randn(2, 4)
    assert ops.softmax.select(x, 1.0, None).name == "cpu"
    half = x.half()  # the C++ kernels leave float16 to PyTorch
    assert ops.softmax.select(half, 1.0, None).name == "aten"
    assert ops.softmax.select(half, 1.0, x > 0).name == "reference"  # aten supports no mask
    with prefer("reference"):
        assert ops.softmax.select(x, 1.0, None).name == "reference"
    assert ops.softmax.select(x, 1.0, None).name == "cpu"


def test_providers_declare_their_priority() -> None:
    priorities = [
        importlib.import_module(f"ingot.kernels.{name}").PRIORITY for name in provider_names()[:-1]
    ]
    assert provider_names() == ("cpu", "triton", "aten", "reference")
    assert priorities == sorted(set(priorities), reverse=True)
    assert min(priorities) > 0  # that of the reference


def test_unknown_provider_raises() -> None:
    with pytest.raises(UnknownName, match="did you mean 'aten'"), prefer("atten"):
        pass
    with pytest.raises(UnknownName, match="unknown provider"):
        ops.silu.provide("mps", lambda x: x, batch_invariant=False)


def test_preferred_provider_computes_the_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name, provider in ops.silu.providers.items():
        if provider.backward is None:  # `cpu` leaves it to the next
            continue

        def backward(*args: Any, name: str = name, wrapped: Any = provider.backward) -> Any:
            used.append(name)
            return wrapped(*args)

        monkeypatch.setitem(ops.silu.providers, name, replace(provider, backward=backward))
    x = torch.randn(2, 4, requires_grad=True)
    with prefer("reference"):
        y = ops.silu(x)
    y.sum().backward()
    ops.silu(x).sum().backward()
    assert used == ["reference", "aten"]


def test_failing_backward_restores_the_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a broken kernel")

    sound = ops.silu.providers["reference"]
    monkeypatch.setitem(ops.silu.providers, "reference", replace(sound, backward=fail))
    with prefer("reference"):
        y = ops.silu(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="a broken kernel"):
        y.sum().backward()
    assert ops.silu.select(torch.ones(1)).name != "reference"


def test_contexts_are_restored_after_an_error() -> None:
    for context in (prefer("reference"), batch_invariant()):
        with pytest.raises(ValueError, match="inside"), context:
            raise ValueError("inside")
    assert (PREFERRED.get(), BATCH_INVARIANT.get(), PREFER_DEPTH.value) == (None, False, 0)
