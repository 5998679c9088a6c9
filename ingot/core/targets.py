"""The target id that losses skip."""

from __future__ import annotations

IGNORE_INDEX = -100
"""Target id excluded from the loss, as in `torch.nn.functional.cross_entropy`."""
