"""Python processes that start quickly: forks of a server that has imported torch and numpy.

    run(["-c", "print(1)"])            as `subprocess.run([sys.executable, ...])`, output captured
    run(["-m", "ingot", "--version"])

Importing them takes most of the time of a short script. Nothing of ingot is imported, so a script
finds its environment variables as a new process would.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_SERVER = """
import json, os, runpy, sys
import numpy, torch

def execute(job):
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY
        os.dup2(os.open(job[name], flags), number)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    if "OMP_NUM_THREADS" in os.environ:  # which OpenMP read when it was loaded
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, what, *rest = job["arguments"]
    sys.argv = [kind, *rest]
    sys.path[:0] = [path for path in job["environment"].get("PYTHONPATH", "").split(":") if path]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})

def status_of(job):
    try:
        execute(job)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = status_of(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_servers: list[subprocess.Popen[str]] = []


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = ".",
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a fork and return its exit status and output."""
    with tempfile.TemporaryDirectory() as directory:
        files = {name: Path(directory) / name for name in ("stdin", "stdout", "stderr")}
        for name, file in files.items():
            file.write_text(stdin or "" if name == "stdin" else "")
        job = {
            "arguments": list(arguments),
            "environment": dict(os.environ if env is None else env),
            "cwd": str(Path(cwd).resolve()),
            **{name: str(file) for name, file in files.items()},
        }
        server = _server()
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [files[name].read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(list(arguments), status, *texts)


def _server() -> subprocess.Popen[str]:
    if not _servers:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _SERVER]
        _servers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        atexit.register(_stop)
    return _servers[0]


def _stop() -> None:
    for server in _servers:
        server.communicate()  # closes its input, which ends it
