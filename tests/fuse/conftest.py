"""Each test proves its rewrites itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.fuse import store


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_path", lambda key: tmp_path / "proofs" / f"{key}.json")
