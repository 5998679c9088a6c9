"""Settings of the server are checked."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.server.config import ServerConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"max_requests": 0},
        {"stall_timeout": float("nan")},
        {"max_batch_size": 0},
        {"max_queue_delay": 11.0},
        {"max_queue_delay": 2.0, "stall_timeout": 1.0},
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)
