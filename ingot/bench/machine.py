"""The peaks of this machine: measured once, then read from the cache.

    peaks().read_bandwidth.value         # GB/s of all cores together
    peaks().matmul["bf16"]               # a Peak in GFLOPS; None where the platform cannot

The cache is keyed by the fingerprint of the machine (`ingot.core.device`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ingot.bench import cpu_peaks, gpu_peaks
from ingot.bench.peaks import ROUNDS, Peaks
from ingot.core import log, paths
from ingot.core.device import detect
from ingot.core.errors import IngotError


def peaks(refresh: bool = False, device: str = "cpu") -> Peaks:
    """Return the peaks of this machine's CPU or GPU: measured once, then read from the cache.

    While another process measures, this one waits, because the two would slow each other down. If
    the cache cannot be written, a warning is logged and the next call measures again.

        peaks().read_bandwidth.value
        peaks(refresh=True)     # measures again
    """
    path = _cache_path(device)
    cached = None if refresh else _load(path)
    if cached:
        return cached

    def measure() -> Peaks:
        if device == "cpu":
            return cpu_peaks.measure(bar.advance)
        return gpu_peaks.measure(device, bar.advance)

    with log.progress("measuring this machine's peaks", ROUNDS) as bar:
        result = None
        try:
            with paths.lock(path):
                # Another process may have measured while it held the lock.
                result = None if refresh else _load(path)
                if result is None:
                    result = measure()
                    paths.write_atomic(path, result.to_json())
                return result
        except IngotError as error:
            log.logger(__name__).warning("the peaks are not cached: %s", error)
            return result or measure()


def cached_peaks() -> Peaks | None:
    """Return the CPU's peaks if they are cached; None otherwise. Nothing is measured."""
    return _load(_cache_path("cpu"))


def _cache_path(device: str) -> Path:
    return paths.cache("peaks", f"{detect().fingerprint}{'' if device == 'cpu' else '-gpu'}.json")


def _load(path: Path) -> Peaks | None:
    try:
        return Peaks.from_json(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
