from __future__ import annotations

import pytest

from ingot.cli.keys import keys
from ingot.core.errors import ConfigError
from ingot.serving.server.keys import Keys


def test_create_prints_a_line_for_the_file_and_the_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys("create", "alice")
    out, err = capsys.readouterr()
    key = err.split()[-1]
    tenant = Keys.parse(out).find(key)
    assert tenant
    assert tenant.name == "alice"
    assert key not in out


def test_an_invalid_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match="invalid tenant name"):
        keys("create", "a b")
