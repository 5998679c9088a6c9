"""`ingot keys`: API keys for `ingot serve --api-key-file`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import tyro


def keys(
    action: Annotated[Literal["create"], tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
) -> None:
    """Create an API key: print its line for the key file to stdout, and the key to stderr.

    Example: `ingot keys create alice >> keys.txt`, then `ingot serve DIR --api-key-file keys.txt`.

    Args:
        action: What to do.
        name: The tenant: 1 to 64 letters, digits and . _ @ -
    """
    from ingot.serving.server.keys import create_key

    key, line = create_key(name)
    sys.stdout.write(line + "\n")
    sys.stderr.write(f"API key of {name}, shown once: {key}\n")
