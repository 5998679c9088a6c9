"""`ingot` in processes that have the fake device.

python -m tests.serving.on_fake_device serve DIR --device fake ...
"""

from __future__ import annotations

import sys

from ingot.serving.workers import fork_server
from tests import fake_device  # noqa: F401  (registers the device)


def main() -> None:
    """Run the command line; the fork server, if the first argument is a file descriptor."""
    if sys.argv[1].isdigit():
        fork_server.main()
    else:
        from ingot.cli import main as run

        fork_server.ForkServer.command = (sys.executable, "-m", "tests.serving.on_fake_device")
        run()


if __name__ == "__main__":
    main()
