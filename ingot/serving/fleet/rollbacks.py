"""Canaries that were rolled back, kept in a file: after a restart they are not tried again.

The file is in `$XDG_STATE_HOME/ingot/rollbacks`, named after the path of the file of deployments:

    {"chat": {"chat-v2@3f9c2a71": [{"share": 0.1, ...}, "12 of 40 requests failed, ...", "rolled_back"]}}

A version's name has the digest of its files and settings, so that another model in the same
directory is tried. The server works without the file; it then tries such a version once more.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ingot.core import paths
from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.fleet.release import CanaryConfig

_log = logger(__name__)


class Rejection(NamedTuple):
    """Why a version is not tried."""

    config: CanaryConfig | None
    """Of the canary; None if it was to replace the stable version at once."""
    reason: str
    outcome: Literal["rolled_back", "failed"]
    """Failed: it cannot be loaded. The next server tries it again."""


Rejections: TypeAlias = Mapping[str, Mapping[str, Rejection]]
"""By deployment and version."""


class RollbackFile:
    """The file for the deployments of a server."""

    def __init__(self, deployments: Path) -> None:
        """`deployments` is the file that names them."""
        digest = hashlib.sha256(str(deployments.resolve()).encode()).hexdigest()[:16]
        self.path = paths.state("rollbacks", f"{paths.sanitize(deployments.stem)}-{digest}.json")
        self._saved = ""

    def load(self) -> Rejections:
        """Return what was saved; nothing if that is impossible."""
        try:
            text = self.path.read_text()
            # `json` knows infinity, which `max_drift` may be.
            found = msgspec.convert(json.loads(text), dict[str, dict[str, Rejection]])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, IngotError) as error:
            _log.warning("rolled back versions are not known: %s: %s", self.path, error)
            return {}
        self._saved = text
        return found

    def save(self, rejections: Rejections) -> None:
        """Replace what was saved by the versions that are rolled back now."""
        kept = {
            name: {v: msgspec.to_builtins(one) for v, one in of_name.items() if _is_kept(one)}
            for name, of_name in rejections.items()
        }
        text = json.dumps({name: versions for name, versions in kept.items() if versions})
        if text == (self._saved or "{}"):
            return
        self._saved = text
        try:
            paths.write_atomic(self.path, text)
        except IngotError as error:
            _log.error("rolled back versions are tried again after a restart: %s", error)


def _is_kept(one: Rejection) -> bool:
    return one.outcome == "rolled_back"
