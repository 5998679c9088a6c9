"""Rows per second and latency of a classifier's server: dynamic batching against one row at a time.

    python benchmarks/inference.py [MODEL] [--rounds N] [--seconds S] [--connections N]
                                   [--deadline-ms MS]

starts `ingot serve MODEL` twice,

    unbatched    with --max-batch-size 1 --max-queue-delay-ms 0
    batched      with its defaults

and sends requests of one row, as binary data, on some connections, each after the answer to the one
before it. The servers are interleaved; each line has the median of the rounds. `late` is the
percentage of requests that were answered after the deadline. Every answer is compared bitwise with
the model's own logits of this row. Without MODEL, dense layers of 1,024, 4,096, 4,096 and 1,000
features are served.
"""

# pyright: basic
from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median, quantiles

import torch

from ingot.interop import classifier
from ingot.nn import Dense, DenseConfig

SYSTEMS = {"unbatched": ["--max-batch-size", "1", "--max-queue-delay-ms", "0"], "batched": []}
ROWS = 32
FIRST_PORT = 8860
READY_S = 120.0


def main(model: Path, rounds: int, seconds: float, connections: int, deadline_s: float) -> None:
    """Time both servers and print a row for each."""
    ports = {name: FIRST_PORT + 2 * index for index, name in enumerate(SYSTEMS)}
    servers = [_serve(model, ports[name], options) for name, options in SYSTEMS.items()]
    try:
        for port in ports.values():
            _wait_until_ready(port)
        requests = _requests(model)
        results: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in SYSTEMS}
        for _ in range(rounds):
            for name, port in ports.items():
                times = asyncio.run(_load(port, requests, connections, seconds))
                results[name].append(_summarize(times, seconds, deadline_s))
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()
    base = median(rate for rate, *_ in results["unbatched"])
    for name, found in results.items():
        rate, p50, p99, late = (median(column) for column in zip(*found, strict=True))
        print(  # noqa: T201
            f"{name:10}{rate:8,.0f} rows/s{rate / base:7.2f}x  p50 {1000 * p50:6.1f} ms  "
            f"p99 {1000 * p99:6.1f} ms  late {late:.2%} of deadline {1000 * deadline_s:g} ms"
        )


def _serve(model: Path, port: int, options: list[str]) -> subprocess.Popen[bytes]:
    address = ["--port", str(port), "--admin-address", f"127.0.0.1:{port + 1}"]
    command = [sys.executable, "-m", "ingot", "serve", str(model), *address, *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _wait_until_ready(port: int) -> None:
    start = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").close()
            return
        except OSError:
            if time.monotonic() - start > READY_S:
                raise
            time.sleep(0.1)


def _requests(directory: Path) -> list[tuple[bytes, bytes]]:
    """Return requests of one row each, and the outputs that belong to them."""
    model, signature = classifier.load(directory)
    (spec,) = signature.inputs
    rows = torch.randn(ROWS, *spec.shape)
    with torch.inference_mode():
        logits = model(rows)
    requests: list[tuple[bytes, bytes]] = []
    for row, output in zip(rows, logits, strict=True):
        data = row.numpy().tobytes()
        tensor = {"name": spec.name, "datatype": spec.datatype, "shape": [1, *spec.shape]}
        tensor["parameters"] = {"binary_data_size": len(data)}
        body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        text = json.dumps(body).encode()
        head = (
            f"POST /v2/models/{directory.resolve().name}/infer HTTP/1.1\r\nhost: x\r\n"
            f"inference-header-content-length: {len(text)}\r\n"
            f"content-length: {len(text) + len(data)}\r\n\r\n"
        )
        requests.append((head.encode() + text + data, output.float().numpy().tobytes()))
    return requests


async def _load(
    port: int, requests: list[tuple[bytes, bytes]], connections: int, seconds: float
) -> list[float]:
    """Return the latency of each request."""
    times: list[float] = []
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (start := time.monotonic()) < end:
            number = (number + 1) % len(requests)
            request, output = requests[number]
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(size)
            assert head.startswith(b"HTTP/1.1 200"), body[:200]
            assert body.endswith(output), "other logits than the model's"
            times.append(time.monotonic() - start)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(connections)))
    return times


def _summarize(
    times: list[float], seconds: float, deadline_s: float
) -> tuple[float, float, float, float]:
    """Return rows per second, median, 99th percentile and the fraction of late requests."""
    cuts, late = quantiles(times, n=100), sum(one > deadline_s for one in times)
    return len(times) / seconds, cuts[49], cuts[98], late / len(times)


def _dense(directory: Path) -> Path:
    config = DenseConfig(in_features=1024, hidden_dims=(4096, 4096), out_features=1000)
    directory.mkdir()
    classifier.save(Dense.from_config(config, seed=0), directory, (1024,))
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--deadline-ms", type=float, default=250.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = args.model or _dense(Path(temporary) / "dense")
        main(path, args.rounds, args.seconds, args.connections, args.deadline_ms / 1000)
