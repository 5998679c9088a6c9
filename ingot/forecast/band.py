"""The band of a forecast: split conformal prediction on the library, adapted to the run itself.

    spread     how much the experts disagree, and what the nearest runs did, for each bin to come
    score      |forecast - truth| / spread
    band       forecast ± quantile x adaption x spread

The quantile is that of the scores of library runs whose own task (or fold) was left out, by the
moment of the forecast and the bin that is forecast. It is learned twice: for tasks that the library
knows, from folds that leave out runs, and for unknown tasks, from folds that leave out whole tasks.
The guarantee of conformal prediction ends where runs are not exchangeable with those of the
library. So the run's own backtests adapt the band: it grows where they missed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.forecast.curve import BINS, Floats

COVERAGE = 0.8
_MOMENTS = 5  # of the run, and as many parts of the bins to come
_FLOOR = 0.01  # spread of experts that agree
_MIN_SCORES = 20


@dataclass(frozen=True)
class Calibration:
    """Quantiles of the scores by moment of the forecast and bin that is forecast, in fifths.

    >>> calibration = Calibration.constant(1.5)
    >>> calibration.quantiles(now=45).tolist()
    [1.5, 1.5, 1.5, 1.5, 1.5]
    """

    table: Floats

    @classmethod
    def constant(cls, value: float) -> Calibration:
        """Return a calibration that is the same everywhere."""
        return cls(np.full((_MOMENTS, _MOMENTS), value))

    @classmethod
    def learn(cls, nows: Sequence[int], scores: Sequence[Floats]) -> Calibration:
        """Learn from the scores of forecasts after `nows` bins, each by bin to come.

        A cell with few scores takes those of all later bins too; the quantile is that of a sample
        of n: ceil((n + 1) coverage) / n.
        """
        table = np.full((_MOMENTS, _MOMENTS), np.nan)
        cells: list[list[list[float]]] = [[[] for _ in range(_MOMENTS)] for _ in range(_MOMENTS)]
        for now, found in zip(nows, scores, strict=True):
            for part, score in zip(_parts(now), found, strict=True):
                cells[_moment(now)][part].append(float(score))
        everything = [score for row in cells for cell in row for score in cell]
        for m, row in enumerate(cells):
            for p, cell in enumerate(row):
                enough = cell if len(cell) >= _MIN_SCORES else [s for c in row for s in c]
                table[m, p] = _quantile(enough if len(enough) >= _MIN_SCORES else everything)
        return cls(table)

    def quantiles(self, now: int) -> Floats:
        """Return the quantile of each bin to come."""
        return self.table[_moment(now), _parts(now)]


def estimate_spread(
    paths: Mapping[str, Floats], weights: Mapping[str, float], variance: Floats
) -> Floats:
    """Return the spread of a forecast in each bin to come; `variance` is that of nearest runs."""
    stacked = np.stack(list(paths.values()))
    share = np.array([weights[name] for name in paths])[:, None]
    mean = (share * stacked).sum(0)
    return np.sqrt((share * (stacked - mean) ** 2).sum(0) + variance + _FLOOR**2)


def adapt(misses: Floats) -> float:
    """Return the factor of the band from scores of the backtest, in units of the quantile.

    Below one, forecasts were inside the band.

    >>> adapt(np.array([0.2, 0.4, 0.5])), adapt(np.array([2.0, 2.5, 3.0]))
    (1.0, 2.5)
    """
    return float(np.clip(np.median(misses), 1.0, 4.0)) if len(misses) else 1.0


def _quantile(scores: Sequence[float]) -> float:
    count = len(scores)
    if not count:
        return 1.0
    return float(np.quantile(scores, min(1.0, np.ceil((count + 1) * COVERAGE) / count)))


def _moment(now: int) -> int:
    return min(now * _MOMENTS // BINS, _MOMENTS - 1)


def _parts(now: int) -> list[int]:
    """Return which fifth of the bins to come each of them is in."""
    ahead = BINS - now
    return [k * _MOMENTS // ahead for k in range(ahead)]
