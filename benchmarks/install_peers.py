"""Installs the systems that `ingot bench compare` compares with, each in its own environment.

    python benchmarks/install_peers.py              # all
    python benchmarks/install_peers.py vllm         # some

It downloads 3 GB and compiles llama.cpp. If an installation fails, the reason is printed and kept,
and the others continue.
"""

from __future__ import annotations

import sys

from ingot.bench.environment import Environment, peers_folder


def main(names: list[str]) -> int:
    """Install the systems of these names, or all; return the number of failures."""
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
