from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton, if only to be compiled")

from ingot.kernels.triton import config_store
from tools import gpu_defaults


def test_formatting_the_stored_defaults_changes_nothing() -> None:
    ranking = config_store.load_defaults()
    assert gpu_defaults.format_ranking(ranking) == config_store.DEFAULTS.read_text()
