"""Installs the peers, each into an environment of its own in ingot's cache.

    python benchmarks/install_peers.py              # all
    python benchmarks/install_peers.py vllm         # some

It takes as long as 3 GB of downloads and the compiling of llama.cpp do. Of one that cannot be
installed the reason is printed and kept, and the others go on.
"""

from __future__ import annotations

import sys

from ingot.bench.environment import Environment, peers_folder


def main(names: list[str]) -> int:
    """Install the peers of these names, or all; the number of those that could not be."""
    failures = 0
    for pins in sorted(peers_folder().glob("*.txt")):
        if names and pins.stem not in names:
            continue
        environment = Environment(pins.stem, pins)
        print(f"{environment.name}: {environment.path}", flush=True)  # noqa: T201
        environment.install()
        reason = environment.unavailable_reason()
        failures += reason is not None
        print(f"{environment.name}: {reason or 'installed'}", flush=True)  # noqa: T201
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
