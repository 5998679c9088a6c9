"""Fits the `MachineConfig` of `ingot simulate` to a server on this machine.

A server runs several loads. The CPU time of its processes is a sum of costs:

    engine  = a * steps + b * tokens + c * keys + d * pairs + e * sequences + f * requests
    others  = a * wakeups + b * requests + c * prompt tokens + d * generated tokens

The others wake up less often the busier they are: they read what several engines have sent
meanwhile. So wakeups are counted (voluntary context switches). Processes that share cores also take
more CPU time for the same work, so all replicas of the prediction should run.
"""

# pyright: basic
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ingot.bench.calibrate import non_negative_lstsq, solve_costs
from ingot.serving.costs import CostModel
from ingot.serving.engine.request import Request
from ingot.serving.machine import MachineConfig, ProcessCosts
from ingot.serving.workload import RequestWorkload

# Concurrent clients, tokens of a prompt, tokens of an output, requests.
_LOADS = (
    (1, 16, 16, 200),
    (1, 120, 2, 400),
    (4, 120, 4, 800),
    (4, 16, 60, 200),
    (16, 16, 4, 1600),
    (16, 64, 60, 400),
    (16, 250, 20, 400),
    (48, 16, 16, 1200),
    (48, 64, 60, 600),
    (48, 120, 4, 1600),
)


@dataclass(frozen=True, kw_only=True)
class RandomPrompts(RequestWorkload):
    """A workload whose prompts have random tokens of every model's vocabulary: those of
    `RequestWorkload` become equal when they are mapped to such a small one.

    >>> workload = RandomPrompts(num_requests=2, length_sigma=0, shared_prefix_ratio=1)
    >>> first, second = [request.prompt for _, request, _ in workload.generate()]
    >>> len(first), max(first) < 256, first[256:] == second[256:]
    (384, True, False)
    """

    salt: int = 0
    """Another one gives other tokens at the same times, so that none is in a prefix cache."""

    def generate(self) -> Iterator[tuple[float, Request, float | None]]:
        """Yield arrival time, request, and the time at which its client disconnects, if any."""
        for arrival, request, disconnect in super().generate():
            numbers = random.Random(f"{self.seed} {self.salt} {request.id}")
            num_shared = self.prefix_len if request.prompt[0] < 2**31 else 0
            tail = numbers.choices(range(256), k=len(request.prompt) - num_shared)
            shared = [token % 251 for token in request.prompt[:num_shared]]
            yield arrival, msgspec.structs.replace(request, prompt=(*shared, *tail)), disconnect


def calibration_loads(max_seq_len: int) -> list[tuple[int, RequestWorkload]]:
    """Return the number of clients of each load, and its requests."""
    return [
        (
            clients,
            RandomPrompts(
                num_requests=num_requests,
                input_len=min(input_len, max_seq_len // 2),
                output_len=min(output_len, max_seq_len // 2),
                length_sigma=0,
                shared_prefix_ratio=0,
                seed=seed,
            ),
        )
        for seed, (clients, input_len, output_len, num_requests) in enumerate(_LOADS)
    ]


def count_tokens(workload: RequestWorkload) -> list[tuple[int, int]]:
    """Return the tokens of prompt and output of each request.

    >>> count_tokens(RequestWorkload(num_requests=2, length_sigma=0, shared_prefix_ratio=0))
    [(128, 64), (128, 64)]
    """
    return [(len(request.prompt), request.max_tokens) for _, request, _ in workload.generate()]


@dataclass(frozen=True, kw_only=True)
class LoadUsage:
    """A load, and the CPU seconds that each process took for it."""

    tokens: Sequence[tuple[int, int]]
    """See `count_tokens`."""
    steps: float
    engine_s: float
    server_s: float
    server_wakeups: float
    clients_s: float
    clients_wakeups: float

    def step(self) -> tuple[float, ...]:
        """Return tokens, keys, pairs, sequences, admitted ones and seconds of the average step of
        the engine."""
        prompt, new = np.array(self.tokens, float).T
        counts = (
            (prompt + new - 1).sum(),
            (prompt * new + new * (new - 1) / 2).sum(),
            (prompt * prompt / 2).sum(),
            new.sum(),
            len(self.tokens),
        )
        return tuple(float(value) / self.steps for value in (*counts, self.engine_s))

    def messages(self) -> tuple[float, ...]:
        """Return the number of requests, prompt tokens and generated tokens."""
        return len(self.tokens), *map(sum, zip(*self.tokens, strict=True))


def fit_machine(
    usages: Sequence[LoadUsage], costs: CostModel, cores: int
) -> tuple[CostModel, MachineConfig]:
    """Return the costs that explain the CPU times of the processes best."""
    server = [(one.server_wakeups, *one.messages(), one.server_s) for one in usages]
    clients = [(one.clients_wakeups, *one.messages(), one.clients_s) for one in usages]
    machine = MachineConfig(cores=cores, server=_fit_process(server), clients=_fit_process(clients))
    return solve_costs([usage.step() for usage in usages], costs), machine


def _fit_process(loads: Sequence[tuple[float, ...]]) -> ProcessCosts:
    """Fit the costs to loads of (wakeups, requests, prompt tokens, generated tokens, seconds), by
    least squares of relative errors.

    >>> loads = [(20, 9, 900, 30), (40, 9, 100, 400), (20, 99, 500, 200), (9, 5, 0, 9)]
    >>> true = ProcessCosts(wakeup_s=2e-4, request_s=1e-3, prompt_token_s=1e-6, token_s=1e-5)
    >>> costs = _fit_process([(*load, np.dot(load, list(vars(true).values()))) for load in loads])
    >>> [round(value, 9) for value in vars(costs).values()]
    [0.0002, 0.001, 1e-06, 1e-05]
    """
    table = np.array(loads)
    counts, seconds = table[:, :-1], table[:, -1]
    found = non_negative_lstsq(counts / seconds[:, None], np.ones(len(seconds)))
    names = ("wakeup_s", "request_s", "prompt_token_s", "token_s")
    return ProcessCosts(**dict(zip(names, map(float, found), strict=True)))
