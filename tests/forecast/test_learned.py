from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import DataError
from ingot.forecast import learned
from ingot.forecast.judge import EXPERTS
from ingot.forecast.learned import Learned, learn
from tests.forecast import libraries


def test_what_is_learned_is_written_and_read(tmp_path: Path) -> None:
    found = learn(libraries.library(40), ["validation_loss"])
    found.save(tmp_path / "learned.json")
    read = Learned.load(tmp_path / "learned.json")
    assert read.known.trust == found.known.trust
    table = read.unknown.calibration.table
    np.testing.assert_allclose(table, found.unknown.calibration.table, rtol=1e-3)
    for name, prior in found.priors.items():
        np.testing.assert_allclose(read.priors[name].mean, prior.mean, rtol=1e-3)


def test_trust_goes_to_what_forecasts_the_library() -> None:
    cases = list(learned._forecast_all(libraries.library(40), "validation_loss"))
    trust = learned._learn_trust(cases)
    assert set(trust) == set(EXPERTS)
    equal = dict.fromkeys(EXPERTS, 0.0)
    assert learned._error(cases, trust) < learned._error(cases, equal)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"priors": {"power law": 3}}'])
def test_other_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "learned.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"learned\.json: cannot be read"):
        Learned.load(path)
