"""A server on a Ray cluster of one node, whose actors are killed.

    unshare -n sh -c 'ip link set lo up && exec python -m tests.serving.on_ray DIRECTORY FOLDER'

Prints what Ray costs compared with processes of this machine, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving.conftest import Served, serving
from tests.serving.workers.test_replicas import BODIES, complete_all

ACTOR = "ray::_WorkerActor"
CALLER = "import ray, sys; ray.init(address=sys.argv[1]); print(ray.cluster_resources())"


def main() -> None:
    """Kill each actor once under load; the answers are those of plain processes."""
    directory, folder = map(Path, sys.argv[1:3])
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with serving_measured(directory, folder) as (served, plain):
        undisturbed = complete_all(served)
    with serving_measured(directory, folder, "--ray") as (served, on_ray):
        check_caller()
        for _ in range(2):
            on_ray["restart_s"] = check_killed(served, undisturbed)
        served.wait(served.quiet)
    assert not actors(), "no actor is left"
    sys.stdout.write("\n" + json.dumps({"plain": plain, "on_ray": on_ray}) + "\n")


@contextmanager
def serving_measured(
    directory: Path, folder: Path, *options: str
) -> Iterator[tuple[Served, dict[str, float]]]:
    """A server with two replicas; its start, memory and latency."""
    start = time.monotonic()
    with serving(directory, folder, "--replicas", "2", *options, wait=False) as served:
        served.wait(lambda: served.metric("ingot:engine_up") == 2, 180)
        facts = {"start_s": round(time.monotonic() - start, 1), "pss_mb": memory()}
        body = {"prompt": "Hello", "max_tokens": 1}
        seconds: list[float] = []
        for _ in range(200):
            start = time.perf_counter()
            assert served.call("/v1/completions", body)[0] == 200
            seconds.append(time.perf_counter() - start)
        facts["latency_ms"] = round(1000 * statistics.median(seconds), 2)
        yield served, facts


def check_killed(served: Served, undisturbed: Any) -> float:
    retries, victim = served.metric("ingot:request_retries"), actors()[0]
    answers = complete_all(served, lambda: os.kill(victim, signal.SIGKILL))
    start = time.monotonic()
    for index, (answer, wanted) in enumerate(zip(answers, undisturbed, strict=True)):
        assert answer == wanted, BODIES[index // 2]
    assert served.metric("ingot:request_retries") > retries
    served.wait(lambda: served.metric("ingot:engine_up") == 2, 120)
    return round(time.monotonic() - start, 1)


def check_caller() -> None:
    """A caller with the token reaches the cluster; others do not."""
    commands = " ".join(command for _, command in processes())
    address = re.findall(r"--gcs-address=(\S+)", commands)[0]
    token = os.environ["RAY_AUTH_TOKEN"]
    for given, works in ((token, True), (secrets.token_hex(32), False), (None, False)):
        mode = {"RAY_AUTH_TOKEN": given} if given else {"RAY_AUTH_MODE": "disabled"}
        try:
            run = subprocess.run(
                [sys.executable, "-c", CALLER, address],
                env={**os.environ, **mode},
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.TimeoutExpired:
            assert not works
            continue
        assert ("CPU" in run.stdout) == works, run.stderr


def actors() -> list[int]:
    """The processes of the actors."""
    return [pid for pid, command in processes() if command.startswith(ACTOR)]


def memory() -> int:
    """The memory of the server and of all it has started, in MB."""
    total = 0
    for pid, _ in processes():
        if pid != os.getpid():
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)[0])
    return total // 1000


def processes() -> list[tuple[int, str]]:
    """The processes of this network namespace, and their commands."""
    ours, found = os.readlink("/proc/self/ns/net"), list[tuple[int, str]]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/net") == ours:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(path.name), command))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
