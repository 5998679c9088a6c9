from __future__ import annotations

import pytest

from ingot.core.errors import UnknownName
from ingot.nn import Decoder, preset


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-124m", 124.4), ("smollm2-135m", 134.5), ("llama-100m", 100.1)]
)
def test_preset_has_the_published_number_of_parameters(name: str, millions: float) -> None:
    parameters = Decoder.on_meta(preset(name)).parameters()
    assert round(sum(p.numel() for p in parameters) / 1e6, 1) == millions


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gpt2-124m'"):
        preset("gpt2-124")
