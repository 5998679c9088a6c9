from __future__ import annotations

import inspect

from torch.nn import functional as F

from ingot.core.targets import IGNORE_INDEX


def test_the_ignored_target_is_that_of_torch() -> None:
    assert inspect.signature(F.cross_entropy).parameters["ignore_index"].default == IGNORE_INDEX
