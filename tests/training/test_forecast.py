from __future__ import annotations

import pytest

from ingot.core.errors import ConfigError
from ingot.training.forecast import ForecastConfig


def test_a_target_is_a_positive_loss() -> None:
    assert ForecastConfig(target_loss=2.0).target_loss == 2.0
    with pytest.raises(ConfigError, match="target_loss"):
        ForecastConfig(target_loss=0.0)
