"""The runner of recorded calls, in C++."""

from __future__ import annotations

from ingot.kernels.cpu.build import library

available = library("replay") is not None
