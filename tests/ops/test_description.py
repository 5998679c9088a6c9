from __future__ import annotations

import pytest
import torch

from ingot import ops
from ingot.ops.description import cost_formula, page, rows, source


def test_rows_list_every_op_once() -> None:
    assert sorted(row["op"] for row in rows()) == sorted(ops.registry())


@pytest.mark.parametrize("op", ops.registry().values(), ids=lambda op: op.name)
def test_every_cost_has_a_formula(op: ops.Op) -> None:
    formula = cost_formula(op)
    assert set(formula) == {"bytes", "flops"}


def test_formula_equals_the_computed_cost() -> None:
    x, weight = torch.ones(3, 4), torch.ones(4)
    formula = cost_formula(ops.rms_norm)
    cost = ops.rms_norm.cost(x, weight, 1e-6)
    assert eval(formula["bytes"], {"x": x, "weight": weight}) == cost.bytes
    assert eval(formula["flops"], {"x": x}) == cost.flops


def test_source_omits_decorator_and_docstring() -> None:
    assert source(ops.silu.reference) == (
        "def silu(x: Tensor) -> Tensor:\n    return x * torch.sigmoid(x)"
    )


def test_page_lists_overrides() -> None:
    assert "**on a GPU**: aten is preferred for packed sequences" in page(ops.attention)
    assert "on a GPU" not in page(ops.silu)


def test_page_has_schema_bound_cost_example_and_reference() -> None:
    text = page(ops.philox_uniform)
    for part in (
        "philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor",
        "at most 2x",
        "gradient**: none",
        ">>> philox_uniform(",
        "philox(",
    ):
        assert part in text
