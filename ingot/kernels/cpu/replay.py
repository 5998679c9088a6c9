"""Load the C++ runner of captured calls."""

from __future__ import annotations

from ingot.kernels.cpu.build import library

available = library("replay") is not None
