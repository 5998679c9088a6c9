"""Replicas: what becomes of requests when engines are killed, what replicas and Ray cost, and
whether `ingot simulate` predicts them.

    python benchmarks/replicas.py kill [MODEL] [--ray] [--replicas 4] [--requests 10000]
                                       [--kills 20] [--load 0.7] [--rate R]
    python benchmarks/replicas.py cost [MODEL] [--ray] [--replicas 4]
    python benchmarks/replicas.py predict [MODEL] [--replicas 4] [--requests 10000] [--load 0.7]
                                          [--rounds 3]

**kill** starts `ingot serve MODEL --replicas 4`, measures how many requests per second it
completes, and sends requests at 70 % of this rate (Poisson arrivals, whether earlier ones have
finished or not). Meanwhile engines are killed with SIGKILL at random moments, as long as another
one is ready. All requests are streamed, greedy or sampled with a seed. Each has to end once, with
the text and the log-probabilities of an undisturbed run. The time to first token is reported by
the seconds since the last kill.

**cost** starts the server with one engine and with all of them, and with `--ray` on a Ray cluster
of this machine, too. It reports the seconds to start, the memory of all processes, the latency of a
request for one token, what a restart takes, and the time of the router's decision.

**predict** measures the CPU time of the processes of a server under several small loads, and fits
the costs of `ingot simulate` to it. With these, the requests that all replicas complete per second
are predicted for more requests than they can serve, and latencies for 70 % of this rate. Then the
same requests are sent to a server, and the errors of the predictions are reported.

Ray listens on all interfaces: with `--ray` everything runs in a network namespace of its own
(`unshare -n`). `--json` prints the results for scripts.
"""

# pyright: basic
from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

ISOLATED = "INGOT_BENCHMARK_IS_ISOLATED"
NUM_BODIES = 40
SINCE_KILL = ((0, 2), (2, 5), (5, 10), (10, 1e9))
START_S = 600.0
WORDS = ["the", "of", "and", "to", "in", "is", "was", "he", "for", "it", "with", "as", "his"]


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    port: int
    admin: str
    start_s: float

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=60) as response:
            page = response.read().decode()
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, rows))

    def label(self, name: str, label: str) -> str:
        """Return the value of a label of a metric."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=60) as response:
            page = response.read().decode()
        return re.findall(rf'^{re.escape(name)}{{.*{label}="(.*?)"', page, re.MULTILINE)[0]

    def wait(self, name: str, value: float) -> float:
        """Wait until a metric has a value; return the seconds."""
        start = time.monotonic()
        while self.metric(name) != value:
            if time.monotonic() - start > START_S or self.process.poll() is not None:
                raise TimeoutError(f"{name} is {self.metric(name)} instead of {value}")
            time.sleep(0.05)
        return time.monotonic() - start

    def engines(self) -> list[int]:
        """Return the engine processes that run."""
        found, commands = [], dict(_processes())
        for pid, command in commands.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # it has exited
                continue
            parent = int(re.findall(r"^PPid:\t(\d+)", status, re.MULTILINE)[0])
            is_local = "fork_server" in command and "fork_server" in commands.get(parent, "")
            is_actor = command.startswith("ray::_WorkerActor")
            if (is_local or is_actor) and "\nState:\tZ" not in status:
                found.append(pid)
        return found


@contextmanager
def serving(model: Path, replicas: int, *options: str) -> Iterator[Server]:
    """Run a server until its engines are ready, and then some."""
    with TemporaryDirectory() as folder:
        log, start = Path(folder) / "log", time.monotonic()
        command = [sys.executable, "-m", "ingot", "serve", str(model), "--port", "0"]
        command += ["--replicas", str(replicas), "--log-format", "json", "--max-requests", "10000"]
        with log.open("w") as file:
            process = subprocess.Popen([*command, *options], stderr=file, text=True)
        try:
            while '"listening' not in log.read_text():
                if process.poll() is not None:
                    raise RuntimeError(log.read_text()[-2000:])
                time.sleep(0.02)
            row = next(r for r in log.read_text().splitlines() if '"listening' in r)
            fields = json.loads(row)
            port = int(fields["address"].rpartition(":")[2])
            server = Server(process, port, fields["admin_address"], 0.0)
            server.wait("ingot:engine_up", replicas)
            server.start_s = time.monotonic() - start
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# Requests


@dataclass
class Outcome:
    """What a client got. Times are those of this process."""

    body: int
    arrived_at: float
    first_token_at: float | None
    status: int
    num_ends: int
    """Terminal events: the end of the stream, or an error."""
    failed: bool
    content: tuple[str, tuple[float, ...]]
    """The text and the log-probabilities."""


def bodies() -> list[bytes]:
    """Return different requests, all streamed."""
    rng, found = random.Random(0), []
    for index in range(NUM_BODIES):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))
        body = {"prompt": prompt, "max_tokens": rng.randint(8, 48), "stream": True, "logprobs": 0}
        body |= {"temperature": 0.8 * (index % 2), "seed": index, "ignore_eos": True}
        found.append(json.dumps(body).encode())
    return found


async def send(port: int, number: int, body: bytes) -> Outcome:
    """Send a request and read the stream."""
    arrived_at, first_token_at, received = time.monotonic(), None, bytearray()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            while data := await reader.read(1 << 16):
                received += data
                if first_token_at is None and b'"text"' in received:
                    first_token_at = time.monotonic()
        finally:
            writer.close()
    except OSError:
        pass
    return parse_outcome(number, arrived_at, first_token_at, bytes(received))


def parse_outcome(
    number: int, arrived_at: float, first_token_at: float | None, received: bytes
) -> Outcome:
    """Return the outcome of a request from the bytes of its response."""
    head, _, rest = received.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    parts = [part for part in re.split(rb"\r\n|\n\n", rest) if part.startswith(b"data: ")]
    events = [json.loads(part[6:]) for part in parts if part != b"data: [DONE]"]
    errors = [event for event in events if "error" in event]
    choices = [choice for event in events for choice in event.get("choices", ())]
    logprobs = [one["logprobs"]["token_logprobs"] for one in choices if one["logprobs"]]
    return Outcome(
        body=number,
        arrived_at=arrived_at,
        first_token_at=first_token_at,
        status=status,
        num_ends=parts.count(b"data: [DONE]") + len(errors) + (status not in (0, 200)),
        failed=status != 200 or bool(errors),
        content=("".join(one["text"] for one in choices), tuple(chain.from_iterable(logprobs))),
    )


async def measure_rate(port: int, requests: list[bytes], seconds: float, clients: int) -> float:
    """Return the requests per second that a number of clients get, each one after the other."""
    ends: list[float] = []
    start = time.monotonic()

    async def client(number: int) -> None:
        while time.monotonic() < start + seconds:
            await send(port, number % len(requests), requests[number % len(requests)])
            ends.append(time.monotonic())
            number += 7

    await asyncio.gather(*[client(number) for number in range(clients)])
    return sum(end < start + seconds for end in ends) / seconds


async def send_all(
    port: int, requests: list[bytes], count: int, rate: float, seed: int
) -> list[Outcome]:
    """Send requests at random times, `rate` per second on average."""
    rng, tasks = random.Random(seed), []
    at = time.monotonic()
    for _ in range(count):
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        number = rng.randrange(len(requests))
        tasks.append(asyncio.create_task(send(port, number, requests[number])))
    return list(await asyncio.gather(*tasks))


# Commands


def kill(args: argparse.Namespace) -> dict[str, object]:
    """Kill engines under load; return what became of the requests."""
    requests = bodies()
    with serving(args.model, args.replicas, *args.options) as server:

        async def run() -> tuple[list[Outcome], list[Outcome], list[float], float]:
            alone = [await send(server.port, n, body) for n, body in enumerate(requests)]
            rate = args.rate
            if rate is None:
                rate = args.load * await measure_rate(server.port, requests, 20.0, 64)
            quiet = await send_all(server.port, requests, args.requests // 10, rate, 1)
            duration = args.requests / rate
            killing = asyncio.create_task(
                asyncio.to_thread(kill_engines, server, args.kills, duration, args.seed)
            )
            found = await send_all(server.port, requests, args.requests, rate, 2)
            return [*alone, *quiet], found, await killing, rate

        before, outcomes, kills, rate = asyncio.run(run())
        # The last engine may have been killed just now.
        server.wait("ingot:engine_restarts", len(kills))
        server.wait("ingot:engine_up", args.replicas)
        retries = server.metric("ingot:request_retries")
    if any(one.failed for one in before):
        raise RuntimeError(
            f"requests of an undisturbed server failed: {Counter(o.status for o in before)}"
        )
    expected = {one.body: one.content for one in before[: len(requests)]}
    return {
        "requests": len(outcomes),
        "requests_per_s": round(rate, 2),
        "kills": len(kills),
        "retries": int(retries),
        "failed": sum(one.failed for one in outcomes),
        "not_one_end": sum(one.num_ends != 1 for one in outcomes),
        "other_bits": sum(not one.failed and one.content != expected[one.body] for one in outcomes),
        "statuses": dict(Counter(str(one.status) for one in outcomes)),
        "ttft_s_undisturbed": _percentiles(before[len(requests) :]),
        "ttft_s_by_seconds_since_kill": _by_seconds_since_kill(outcomes, kills),
    }


def kill_engines(server: Server, count: int, duration: float, seed: int) -> list[float]:
    """Kill random engines at random times within `duration` seconds; return when.

    Each kill ends one process that ran, while another one is ready.
    """
    rng, start, kills = random.Random(seed), time.monotonic(), list[float]()
    for at in sorted(rng.uniform(0, duration) for _ in range(count)):
        time.sleep(max(0.0, start + at - time.monotonic()))
        while server.metric("ingot:engine_up") < 2 or not (engines := server.engines()):
            time.sleep(0.1)
        victim, up = rng.choice(engines), server.metric("ingot:engine_up")
        os.kill(victim, signal.SIGKILL)
        kills.append(time.monotonic())
        # Until the server knows: an engine that is still loading is not counted as ready.
        deadline = time.monotonic() + 120
        while victim in server.engines() or server.metric("ingot:engine_restarts") < len(kills):
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {victim} of {up:g} is not restarted")
            time.sleep(0.05)
    return kills


def _by_seconds_since_kill(
    outcomes: list[Outcome], kills: list[float]
) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        earlier = [at for at in kills if at <= one.arrived_at]
        if earlier:
            seconds = one.arrived_at - earlier[-1]
            low, high = next(bounds for bounds in SINCE_KILL if bounds[0] <= seconds < bounds[1])
            groups.setdefault(f"{low} to {high}" if high < 1e9 else f"{low} or more", []).append(
                one
            )
    return {name: _percentiles(group) for name, group in sorted(groups.items(), key=_first_number)}


def _first_number(item: tuple[str, object]) -> float:
    return float(item[0].split()[0])


def _percentiles(outcomes: list[Outcome]) -> dict[str, float]:
    times = [o.first_token_at - o.arrived_at for o in outcomes if o.first_token_at is not None]
    if len(times) < 2:
        return {"requests": len(times)}
    cuts = quantiles(times, n=100, method="inclusive")
    return {"requests": len(times), "p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}


def cost(args: argparse.Namespace) -> dict[str, object]:
    """Return what the server costs with one engine and with several."""
    found: dict[str, object] = {"router_ms": _router_ms(args.replicas)}
    systems = {"one engine": (1, ()), f"{args.replicas} engines": (args.replicas, ())}
    if args.ray:
        systems["1 on Ray"] = (1, ("--ray",))
        systems[f"{args.replicas} on Ray"] = (args.replicas, ("--ray",))
    for name, (replicas, options) in systems.items():
        before = _memory()
        with serving(args.model, replicas, *options) as server:
            memory = _memory() - before
            body = b'{"prompt": "Hello", "max_tokens": 1, "stream": true, "logprobs": 0}'
            seconds = asyncio.run(_latencies(server.port, body))
            cuts = quantiles(seconds, n=4)
            found[name] = {
                "start_s": round(server.start_s, 1),
                "memory_mb": round(memory / 1e6),
                "latency_ms": round(1000 * median(seconds), 2),
                "latency_ms_quartiles": [round(1000 * cuts[0], 2), round(1000 * cuts[2], 2)],
                **_restart(server, replicas),
            }
    return found


def _restart(server: Server, replicas: int) -> dict[str, float]:
    """Kill an engine that is idle; return the seconds until another one is ready, and the CPU
    seconds that it took."""
    before, start = server.engines(), time.monotonic()
    os.kill(before[0], signal.SIGKILL)
    server.wait("ingot:engine_restarts", 1)
    server.wait("ingot:engine_up", replicas)
    seconds = time.monotonic() - start
    (new,) = {*server.engines()} - {*before}
    return {"restart_s": round(seconds, 2), "restart_cpu_s": round(_cpu_seconds(new), 2)}


async def _latencies(port: int, body: bytes) -> list[float]:
    seconds: list[float] = []
    for _ in range(300):
        start = time.perf_counter()
        outcome = await send(port, 0, body)
        assert outcome.num_ends == 1, outcome
        seconds.append(time.perf_counter() - start)
    return seconds[20:]


def _router_ms(replicas: int) -> float:
    """Return the median time of a decision about a prompt of 1,000 tokens, half of them cached."""
    from ingot.serving.engine.request import Request
    from ingot.serving.engine.scheduler import SchedulerConfig
    from ingot.serving.fleet.router import Router

    router, times = Router(SchedulerConfig(num_blocks=4096)), []
    for replica in range(replicas):
        router.add(replica)
    for id in range(1000):
        prompt = (*range(id % 20, id % 20 + 500), *range(id + 1000, id + 1500))
        request = Request(id=id, prompt=prompt, max_tokens=16)
        start = time.perf_counter()
        router.choose(request)
        times.append(time.perf_counter() - start)
        if id >= 100:
            router.finish(id - 100)
    return round(1000 * median(times), 3)


def _memory() -> int:
    """Return the memory of the processes in this network namespace, in bytes."""
    total = 0
    for pid, _ in _processes():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * int(re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)[0])
    return total


def _processes() -> list[tuple[int, str]]:
    """Return the descendants of this process, and those of Ray in the same network namespace."""
    found: list[tuple[int, str]] = []
    ours = os.readlink("/proc/self/ns/net")
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/net") == ours:
                pid = int(path.name)
                commands[pid] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    for pid, command in commands.items():
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() or (ISOLATED in os.environ and pid != os.getpid()):
            found.append((pid, command))
    return [one for one in found if one[0] != os.getpid()]


# Predictions


def predict(args: argparse.Namespace) -> dict[str, object]:
    """Compare simulated replicas with real ones on the same requests."""
    from ingot.bench import serve
    from ingot.serving.engine.scheduler import SchedulerConfig
    from ingot.serving.simulate import SLO, FleetConfig, simulate

    costs, machine, blocks = calibrate(args.model, args.replicas)
    fleet, config = FleetConfig(replicas=args.replicas), SchedulerConfig(num_blocks=blocks)

    def run_simulation(workload):
        return simulate(config, costs, workload, SLO(), fleet=fleet, machine=machine)

    # As many requests as wait without being refused.
    most = run_simulation(_trace(args, 1e6, share=0.1)).requests_per_s
    traces = {"overload": _trace(args, 1.5 * most, share=0.1)}
    capacity = run_simulation(traces["overload"]).requests_per_s
    traces["load"] = dataclasses.replace(_trace(args, args.load * capacity), seed=args.seed + 1)
    found: dict[str, object] = {"costs": dataclasses.asdict(costs)}
    found["machine"] = dataclasses.asdict(machine)
    found["requests_per_s"] = {name: round(one.request_rate, 1) for name, one in traces.items()}
    print(json.dumps(found), file=sys.stderr, flush=True)  # noqa: T201
    with serving(args.model, args.replicas) as server:
        address = f"http://127.0.0.1:{server.port}"
        warm_up = dataclasses.replace(_trace(args, capacity / 2, share=0.1), salt=1)
        serve.send_over_http(address, serve.Load(workload=warm_up))
        for name, workload in traces.items():
            predicted = _figures(run_simulation(workload))
            rounds = []
            for number in range(args.rounds):
                salted = dataclasses.replace(workload, salt=2 + number)
                records = serve.send_over_http(address, serve.Load(workload=salted))
                rounds.append(_figures(serve.summarize([records], SLO())))
                print(name, rounds[-1], file=sys.stderr, flush=True)  # noqa: T201
            found[name] = {
                key: _compare(predicted[key], [r[key] for r in rounds]) for key in predicted
            }
    return found


def calibrate(model: Path, replicas: int):
    """Return the costs of an engine's step, the machine, and the blocks of an engine's cache.

    All replicas run: with 4 on 2 cores, a step takes 1.65 times the CPU time of one that has a core
    and its caches to itself.
    """
    from ingot.bench.server_costs import calibration_loads, fit_machine
    from ingot.interop import hf
    from ingot.serving.costs import CostModel

    loads = calibration_loads(hf.describe(model).config.max_seq_len)
    with serving(model, replicas) as server:
        blocks = int(server.label("vllm:cache_config_info", "num_gpu_blocks"))
        _measure_usage(server, *loads[-1])  # warm-up
        usages = [_measure_usage(server, *load) for load in loads]
    return *fit_machine(usages, CostModel(), os.cpu_count() or 1), blocks


def _measure_usage(server: Server, clients: int, workload):
    from ingot.bench.serve import Load, send_over_http
    from ingot.bench.server_costs import LoadUsage, count_tokens

    def read_counters() -> list[float]:
        steps = server.metric("ingot:engine_steps_total")
        engines, pid = sum(map(_cpu_seconds, server.engines())), server.process.pid
        processes = _cpu_seconds(pid), _wakeups(pid), time.process_time(), _wakeups(os.getpid())
        return [steps, engines, *processes]

    before = read_counters()
    address = f"http://127.0.0.1:{server.port}"
    send_over_http(address, Load(workload=workload, clients=clients))
    values = [b - a for a, b in zip(before, read_counters(), strict=True)]
    names = ("steps", "engine_s", "server_s", "server_wakeups", "clients_s", "clients_wakeups")
    return LoadUsage(tokens=count_tokens(workload), **dict(zip(names, values, strict=True)))


def _trace(args: argparse.Namespace, rate: float, share: float = 1.0):
    from ingot.bench.server_costs import RandomPrompts

    return RandomPrompts(
        num_requests=int(args.requests * share),
        request_rate=rate,
        input_len=64,
        output_len=32,
        length_sigma=0.6,
        max_len=512,
        prefix_len=64,
        num_prefixes=8,
        seed=args.seed,
    )


def _figures(report) -> dict[str, float]:
    if report.finish_reasons != {"length": report.num_requests}:
        raise RuntimeError(f"requests were not completed: {report.finish_reasons}")
    # Not the first token: its text may wait for the other bytes of a character.
    return {
        "requests_per_s": report.requests_per_s,
        "latency_p50_s": report.e2e["p50"],
        "latency_p99_s": report.e2e["p99"],
    }


def _compare(predicted: float, measured: list[float]) -> dict[str, object]:
    error = predicted / median(measured) - 1
    return {"predicted": predicted, "measured": sorted(measured), "error": round(error, 3)}


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _wakeups(pid: int) -> float:
    """Return how often the main thread of a process has waited."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(re.findall(r"^voluntary_ctxt_switches:\t(\d+)", status, re.MULTILINE)[0])


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["kill", "cost", "predict"])
    parser.add_argument("model", nargs="?", type=Path, default=Path("smollm2"))
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.ray and ISOLATED not in os.environ:
        os.environ[ISOLATED] = "1"
        inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvp("unshare", ["unshare", "-n", *inside])
    args.options = ["--ray"] if args.ray and args.command == "kill" else []
    found = {"kill": kill, "cost": cost, "predict": predict}[args.command](args)
    lines = [json.dumps(found)]
    if not args.json:
        lines = [f"{name}: {json.dumps(value)}" for name, value in found.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
