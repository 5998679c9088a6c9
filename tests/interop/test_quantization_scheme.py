from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.interop.compressed_tensors import COMPRESSED_TENSORS
from ingot.interop.quantization_scheme import LayerGroup, QuantizationScheme, check_finite
from ingot.nn.formats import Int4, Int8

DOWN = "model.layers.0.mlp.down_proj"


def test_a_name_precedes_the_class_and_ignored_layers_precede_both() -> None:
    scheme = QuantizationScheme(
        (
            LayerGroup(Int4()),
            LayerGroup(Int8(), ("re:.*down", "model.embed_tokens")),
        ),
        COMPRESSED_TENSORS,
        ("lm_head", "re:.*layers.1.*"),
    )
    assert scheme.format_of(DOWN) == Int8()
    assert scheme.format_of("model.layers.0.mlp.up_proj") == Int4()
    assert scheme.format_of("model.layers.1.mlp.down_proj") is None
    assert scheme.format_of("lm_head") is None
    assert scheme.format_of("model.embed_tokens", linear=False) == Int8()
    assert scheme.format_of("model.other_embedding", linear=False) is None


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:" + "a*" * 9, "re:(", "re:" + "a" * 300])
def test_patterns_that_could_take_forever_raise(pattern: str) -> None:
    scheme = QuantizationScheme((LayerGroup(Int8()),), COMPRESSED_TENSORS, (pattern,))
    with pytest.raises(ConfigError, match="pattern"):
        scheme.format_of(DOWN)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_raise(value: float) -> None:
    check_finite(torch.ones(3), "layer")
    with pytest.raises(ConfigError, match="layer: a scale is not finite"):
        check_finite(torch.tensor([1.0, value]), "layer")
