"""ingot beside what a user would pick instead: the same weights and prompts, in one run.

    systems = found(clone())
    rows = compare(systems, model, Task(batch=1, prompt=16, new=128, rounds=5), peaks())

**Systems.** `benchmarks/peers/NAME.py` drives one of them as its documentation says, in an
environment of its own (see `ingot.bench.environment`); `ingot` runs in this one. One that is not
installed, fails or gives wrong answers has a row that says why; none is left out.

**Turns.** All stay loaded, in processes that sleep while others work (see `ingot.bench.peer`). In
each round every system gets the same prompts, one after another, so that all meet the same
neighbours; speeds are stated as p20, p50 and p80 of the rounds, and ratios are taken within a
round. The first round does not count: compiling, first touches.

**Prompts** are random tokens, others in each round and each sequence, so that a cache of prefixes
helps nobody. All generate greedily, and past the end of the text.

**The same numbers.** `agree` is how many of the first tokens are those of the first system in the
list that answered, in all sequences of a round; p50 of the rounds. In 16 bits two ways to add up
differ after some tokens, the sooner the more random the text; other weights differ from the first
on, in every round.

**Speed** is new tokens over the time of the whole call, prefill included. `memory_mb` is what all
processes of a system hold after the last round.

**The limit.** Each step reads all weights once (but the embedding, where the last layer has a
matrix of its own) and the keys and values of all sequences, and multiplies by the weights; each
takes as long as bytes over the bandwidth of reading or FLOPs over the matmul peak in bfloat16,
whichever is more. The first step has all tokens of the prompts. What neighbours leave of the
bandwidth changes by the minute, so it is measured in every round, before the systems take their
turns (`read_gbs`, p50 of the rounds). The arithmetic of attention is left out, and so are experts
that are not chosen: for a mixture of experts the limit is too low.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch

from ingot.bench.environment import Environment
from ingot.bench.ops import READER_ROW, Limit, reader
from ingot.bench.peaks import Peaks
from ingot.bench.peer import Answer, Failure, Hello, Process
from ingot.bench.timing import interleaved
from ingot.core import paths
from ingot.core.errors import ConfigError, UnknownName
from ingot.interop import hf
from ingot.nn.weights import SafetensorsDir
from ingot.ops.op import Cost

OURS = "ingot"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What each system is asked in each round.

    >>> Task(batch=0, prompt=16, new=128, rounds=5)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: batch is 0
      hint: choose a number from 1 to 1024
    """

    batch: int
    prompt: int
    new: int
    rounds: int

    def __post_init__(self) -> None:
        for name, most in {"batch": 1024, "prompt": 2**20, "new": 2**20, "rounds": 1000}.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}", hint=f"choose a number from 1 to {most}")

    def prompts(self, vocabulary: int, turn: int) -> list[list[int]]:
        """Random tokens of a round, the same in every run.

        >>> task = Task(batch=2, prompt=3, new=1, rounds=1)
        >>> [len(prompt) for prompt in task.prompts(100, turn=0)]
        [3, 3]
        """
        dice = random.Random(turn)
        return [[dice.randrange(vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of a Hugging Face directory without loading it."""

    path: Path
    vocabulary: int
    context: int
    step: Cost
    """Of one token: the bytes of weights that are read, the FLOPs of multiplying by them."""
    kv: int
    """Bytes of keys and values of one token."""

    @classmethod
    def of(cls, path: Path) -> Model:
        """Read its configuration and the headers of its weights."""
        found, entries = hf.describe(path), SafetensorsDir(path).entries
        used = [
            entry
            for name, entry in entries.items()
            if "lm_head.weight" not in entries or "embed_tokens" not in name
        ]
        step = Cost(
            bytes=sum(entry.bytes for entry in used),
            flops=sum(2 * math.prod(entry.shape) for entry in used),
        )
        return cls(
            path=path.resolve(),
            vocabulary=found.config.vocab_size,
            context=found.config.max_seq_len,
            step=step,
            kv=found.kv.bytes_per_token,
        )


@dataclass(frozen=True, kw_only=True)
class System:
    """Who takes part: how to start it, or why it cannot be."""

    name: str
    python: Path
    folder: Path
    """That of its script."""
    missing: str | None = None

    def start(self, model: Path, cache: Path) -> Process:
        """A process that begins to load the model."""
        module, log = f"{self.folder.name}.{self.name}", cache / f"{self.name}.log"
        command = [str(self.python), "-m", module, str(model), str(cache)]
        if self.name != OURS:
            return Process(command, self.folder.parent, log)
        # ingot's script imports the ingot that is running now, and has what its commands have.
        variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
        variables |= {k: v for k, v in os.environ.items() if k == "GOMP_SPINCOUNT"}
        return Process(command, self.folder.parent, log, variables)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one task; without figures if it is missing."""

    system: str
    version: str | None = None
    dtype: str | None = None
    model: str
    batch: int
    prompt: int
    new: int
    rounds: int
    tokens_per_s: float | None = None
    p20: float | None = None
    p80: float | None = None
    ingot_faster: float | None = None
    """How many times as fast ingot is in the same round: p50 of the rounds, then p20 and p80."""
    ingot_faster_p20: float | None = None
    ingot_faster_p80: float | None = None
    first_token_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    start_s: float | None = None
    memory_mb: float | None = None
    agree: int | None = None
    read_gbs: float
    limit_tokens_per_s: float
    share_of_limit: float | None = None
    missing: str | None = None


@dataclass
class Turns:
    """What one system did: its answers, one a round, or why there are none."""

    hello: Hello | None = None
    answers: list[Answer] = field(default_factory=list[Answer])
    memory: int | None = None
    missing: str | None = None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep the reason of a failure, which is none to stop the others."""
        try:
            yield
        except Failure as failure:
            self.missing = str(failure)

    def rates(self) -> list[float]:
        """New tokens a second, of each round."""
        return [sum(map(len, a.tokens)) / a.seconds_total for a in self.answers]


def found(folder: Path, names: Iterable[str] = ()) -> list[System]:
    """ingot, and the peers that have a list of packages there; only these names, if any."""
    script = folder / f"{OURS}.py"
    absent = None if script.exists() else f"there is no {script.name} in {folder}"
    systems = [System(name=OURS, python=Path(sys.executable), folder=folder, missing=absent)]
    for pins in sorted(folder.glob("*.txt")):
        home = Environment(pins.stem, pins)
        systems.append(
            System(name=pins.stem, python=home.python, folder=folder, missing=home.missing())
        )
    wanted, known = set(names), {system.name for system in systems}
    for name in wanted - known:
        raise UnknownName("peer", name, known)
    return [system for system in systems if not wanted or system.name in wanted]


def compare(
    systems: Sequence[System],
    model: Model,
    task: Task,
    machine: Peaks,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Start all, let them take turns, and sum up; `progress` hears of each start and turn."""
    if task.prompt + task.new > model.context:
        raise ConfigError(
            f"{task.prompt} + {task.new} tokens are beyond the model's {model.context}",
            hint="choose a shorter prompt or fewer new tokens",
        )
    cache = paths.ensure_trusted(paths.cache("peers"))
    turns = {system.name: Turns(missing=system.missing) for system in systems}
    with ExitStack() as stack:
        running: dict[str, Process] = {}
        for system in systems:
            if not system.missing:
                progress(f"starting {system.name}")
                process = stack.enter_context(system.start(model.path, cache))
                running[system.name] = process
                with turns[system.name].kept():
                    turns[system.name].hello = process.start()
        reading: list[float] = []
        for turn in range(task.rounds + 1):
            prompts = task.prompts(model.vocabulary, turn)
            progress(f"round {turn} of {task.rounds}: reading memory")
            reading.append(read_bandwidth())
            for name, process in running.items():
                progress(f"round {turn} of {task.rounds}: {name}")
                if not turns[name].missing:
                    with turns[name].kept():
                        turns[name].answers.append(process.ask(prompts, task.new))
        for name, process in running.items():
            turns[name].memory = process.memory()
    for of in turns.values():
        del of.answers[:1]
    return rows(turns, model, task, machine, _spread(reading[1:])[1])


def read_bandwidth() -> float:
    """Bytes a second that reading memory gets now, as `ingot.bench.ops` probes it."""
    memory = torch.ones(2**26 // READER_ROW, READER_ROW)
    read, size = reader(memory, memory.nbytes // 4)
    return size / interleaved({"": read}, 0.3, minimum=5)[""].p50


def limit(model: Model, task: Task, machine: Peaks, bandwidth: float) -> float:
    """Tokens a second of a system that wastes nothing on this machine."""
    peak = machine.matmul["bf16"]
    flops = peak and peak.value * 1e9

    def seconds(tokens: int, keys: int) -> float:
        read = model.step.bytes + keys * model.kv
        cost = Cost(bytes=read, flops=tokens * model.step.flops)
        return Limit.of(cost, bandwidth, flops).seconds

    batch, prompts = task.batch, task.batch * task.prompt
    steps = (seconds(batch, prompts + batch * done) for done in range(1, task.new))
    return batch * task.new / (seconds(prompts, prompts) + sum(steps))


def rows(
    turns: Mapping[str, Turns], model: Model, task: Task, machine: Peaks, bandwidth: float
) -> list[Row]:
    """Sum up, a row a system, in the order given."""
    most = limit(model, task, machine, bandwidth)
    present = {name: of for name, of in turns.items() if of.hello and not of.missing}
    first = next(iter(present.values()), None)
    ours = present.get(OURS)
    shared: dict[str, Any] = {
        "model": model.path.name,
        "batch": task.batch,
        "prompt": task.prompt,
        "new": task.new,
        "rounds": task.rounds,
        "read_gbs": _short(bandwidth / 1e9),
        "limit_tokens_per_s": _short(most),
    }
    return [
        Row(system=name, **shared, **_figures(of, first, ours, task, most))
        if name in present and first
        else Row(system=name, **shared, missing=of.missing or "no answer")
        for name, of in turns.items()
    ]


def agreement(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """How many of the first tokens are the same in every sequence.

    >>> agreement([[5, 6, 7], [1, 2, 3]], [[5, 6, 8], [1, 2, 3]])
    2
    """
    together = zip(zip(*some, strict=True), zip(*others, strict=True), strict=True)
    count = 0
    for mine, yours in together:
        if mine != yours:
            break
        count += 1
    return count


def _figures(
    of: Turns, first: Turns, ours: Turns | None, task: Task, most: float
) -> dict[str, Any]:
    assert of.hello
    low, usual, high = _spread(of.rates())
    faster = _ratios(ours, of) if ours else (None, None, None)
    times = [a.first_token_seconds for a in of.answers if a.first_token_seconds]
    seconds = _spread(times)[1] if times else None
    return {
        "version": of.hello.version,
        "dtype": of.hello.dtype,
        "tokens_per_s": usual,
        "p20": low,
        "p80": high,
        "ingot_faster_p20": faster[0],
        "ingot_faster": faster[1],
        "ingot_faster_p80": faster[2],
        "first_token_ms": seconds and _short(seconds * 1e3),
        "prefill_tokens_per_s": seconds and _short(task.batch * task.prompt / seconds),
        "start_s": _short(of.hello.ready),
        "memory_mb": of.memory and _short(of.memory / 1e6),
        "agree": median_low(
            agreement(a.tokens, b.tokens) for a, b in zip(of.answers, first.answers, strict=True)
        ),
        "share_of_limit": _short(usual / most),
    }


def _ratios(ours: Turns, of: Turns) -> tuple[float, float, float]:
    pairs = zip(ours.rates(), of.rates(), strict=True)
    return _spread([mine / theirs for mine, theirs in pairs])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    low, usual, high = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
    return _short(low), _short(usual), _short(high)


def _short(value: float) -> float:
    """Four digits: more are noise."""
    return float(f"{value:.4g}")
