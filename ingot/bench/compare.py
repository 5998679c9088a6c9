"""Compares generation with other systems: the same weights and prompts, in one run.

    systems = find_systems(peers_folder())
    task = GenerationTask(batch_size=1, input_len=16, output_len=128, rounds=5)
    rows = compare(systems, ModelCost.read(directory), task, peaks())

**Systems.** `benchmarks/peers/NAME.py` drives one of them as its documentation recommends, in its
own environment (see `ingot.bench.environment`); `ingot` runs in the current one. A system that is
not installed, fails or returns invalid output has a row with the error; none is left out.

**Interleaving.** All systems stay loaded, in processes that are stopped while another one works
(see `ingot.bench.subprocess_system`). In each round every system gets the same prompts, one system
after the other, so that all see the same load from other processes. Speeds are p20, p50 and p80 of
the rounds, and speedups are computed within a round. The first round is discarded: compilation,
page faults.

**Prompts** are random tokens, different in each round and each sequence, so that a prefix cache has
no effect. All systems generate greedily and ignore the end of text.

**Same tokens.** `matching_tokens` is the length of the prefix that is equal to the tokens of the
first system in the list that succeeded, in all sequences of a round; p50 of the rounds. In 16 bits,
two reduction orders diverge after some tokens, the sooner the more random the text; different
weights diverge at the first token, in every round.

**Quantized weights** have the same integers and scales in all systems; some also quantize the
activations, each in its own way, so tokens may diverge sooner. `dtype` is the format of the weights
in memory.

**Speed** is output tokens over the time of the whole call, prefill included. `memory_mb` is the
memory of all processes of a system after the last round (proportional set size), `peak_memory_mb`
the most that each has had (resident set size, loading included), summed.

**Roofline.** Each step reads all weights once (except the embedding, if the LM head has its own
matrix) and the keys and values of all sequences, and multiplies by the weights; it takes bytes over
the read bandwidth or FLOPs over the matmul peak, whichever is longer. The peak is the highest of
bf16, fp32 (CPUs without bf16 instructions convert the weights) and, for quantized weights, int8.
The first step has all tokens of the prompts. The bandwidth that other tenants leave changes by the
minute, so it is measured in every round before the systems run (`read_gbs`, p50 of the rounds). The
FLOPs of attention are not counted, and neither is the choice of experts: for a mixture of experts
the roofline is too low.
"""

from __future__ import annotations

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

from ingot.bench.bandwidth import allocate
from ingot.bench.environment import Environment
from ingot.bench.ops import Roofline, make_probe
from ingot.bench.peaks import Dtype, Peaks
from ingot.bench.subprocess_system import Generation, SystemFailure, SystemProcess, SystemReady
from ingot.bench.timing import round_measurement, time_call
from ingot.core import paths
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError, UnknownName
from ingot.interop import compressed_tensors, hf
from ingot.nn.weights import SafetensorsDir
from ingot.ops.record import Cost

OURS = "ingot"


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """The work of each system in each round.

    >>> GenerationTask(batch_size=1, input_len=16, output_len=128, rounds=0)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: GenerationTask.rounds: expected a number from 1 to 1000, got 0
      hint: give a number from 1 to 1000
    """

    batch_size: int
    input_len: int
    output_len: int
    rounds: int

    def __post_init__(self) -> None:
        lengths = (1, 2**20)
        check_bounds(
            self, batch_size=(1, 1024), input_len=lengths, output_len=lengths, rounds=(1, 1000)
        )

    def prompts(self, vocab_size: int, round_index: int) -> list[list[int]]:
        """Return the random tokens of a round, the same in every run.

        >>> task = GenerationTask(batch_size=2, input_len=3, output_len=1, rounds=1)
        >>> [len(prompt) for prompt in task.prompts(100, round_index=0)]
        [3, 3]
        """
        rng, length = random.Random(round_index), range(self.input_len)
        return [[rng.randrange(vocab_size) for _ in length] for _ in range(self.batch_size)]


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Sizes and costs of a model directory, known without loading it."""

    path: Path
    vocab_size: int
    max_seq_len: int
    step: Cost
    """Of one token: bytes of weights read, FLOPs of multiplying by them."""
    kv_bytes: int
    """Bytes of keys and values of one token."""
    is_quantized: bool = False

    @classmethod
    def read(cls, path: Path) -> ModelCost:
        """Read the configuration and the headers of the weights."""
        described, entries = hf.describe(path), SafetensorsDir(path).entries
        used = {
            name: entry
            for name, entry in entries.items()
            if "lm_head.weight" not in entries or "embed_tokens" not in name
        }
        counts = [compressed_tensors.count_values(name, used[name].shape) for name in used]
        step = Cost(bytes=sum(entry.bytes for entry in used.values()), flops=2 * sum(counts))
        return cls(
            path=path.resolve(),
            vocab_size=described.config.vocab_size,
            max_seq_len=described.config.max_seq_len,
            step=step,
            kv_bytes=described.kv.bytes_per_token,
            is_quantized=any(name.endswith(".weight_scale") for name in entries),
        )


@dataclass(frozen=True, kw_only=True)
class GenerationSystem:
    """A system that takes part: how to start it, or why it cannot be started."""

    name: str
    python: Path
    folder: Path
    """The folder of its script."""
    error: str | None = None

    def start(self, model: Path, cache: Path) -> SystemProcess:
        """Start a process that begins to load the model."""
        module, log = f"{self.folder.name}.{self.name}", cache / f"{self.name}.log"
        command = [str(self.python), "-m", module, str(model), str(cache)]
        if self.name != OURS:
            return SystemProcess(command, self.folder.parent, log)
        # ingot's script imports the running ingot and gets the environment of its commands.
        variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
        variables |= {k: v for k, v in os.environ.items() if k == "GOMP_SPINCOUNT"}
        return SystemProcess(command, self.folder.parent, log, variables)


@dataclass(frozen=True, kw_only=True)
class CompareRow:
    """One system on one task; without measurements if it has an error."""

    system: str
    version: str | None = None
    dtype: str | None = None
    model: str
    batch_size: int
    input_len: int
    output_len: int
    rounds: int
    tokens_per_s: float | None = None
    p20: float | None = None
    p80: float | None = None
    speedup: float | None = None
    """Speed of ingot over this system's in the same round: p50 of the rounds, then p20 and p80."""
    speedup_p20: float | None = None
    speedup_p80: float | None = None
    ttft_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    load_s: float | None = None
    memory_mb: float | None = None
    peak_memory_mb: float | None = None
    matching_tokens: int | None = None
    read_gbs: float
    roofline_tokens_per_s: float
    roofline_fraction: float | None = None
    error: str | None = None


@dataclass
class GenerationRuns:
    """The generations of one system, one per round, or the error that stopped it."""

    ready: SystemReady | None = None
    generations: list[Generation] = field(default_factory=list[Generation])
    memory: int | None = None
    peak_memory: int | None = None
    error: str | None = None

    @contextmanager
    def recording_failure(self) -> Generator[None]:
        """Record a failure, so that the other systems continue."""
        try:
            yield
        except SystemFailure as failure:
            self.error = str(failure)

    def rates(self) -> list[float]:
        """Output tokens per second of each round."""
        return [sum(map(len, g.tokens)) / g.total_seconds for g in self.generations]


def find_systems(folder: Path, names: Iterable[str] = ()) -> list[GenerationSystem]:
    """Return ingot and the systems with a requirements file in `folder`; only `names` if given."""
    script = folder / f"{OURS}.py"
    error = None if script.exists() else f"{folder}: {script.name} not found"
    systems = [GenerationSystem(name=OURS, python=Path(sys.executable), folder=folder, error=error)]
    for pins in sorted(folder.glob("*.txt")):
        home = Environment(pins.stem, pins)
        error = home.unavailable_reason()
        systems.append(
            GenerationSystem(name=pins.stem, python=home.python, folder=folder, error=error)
        )
    wanted, known = set(names), {system.name for system in systems}
    for name in wanted - known:
        raise UnknownName("system", name, known)
    return [system for system in systems if not wanted or system.name in wanted]


def compare(
    systems: Sequence[GenerationSystem],
    model: ModelCost,
    task: GenerationTask,
    machine: Peaks,
    progress: Callable[[str], object] = lambda _: None,
) -> list[CompareRow]:
    """Run all systems, interleaved by round; `progress` is called before each start and turn."""
    if task.input_len + task.output_len > model.max_seq_len:
        raise ConfigError(
            f"input_len + output_len: must be at most {model.max_seq_len} (max_seq_len), got "
            f"{task.input_len} + {task.output_len}",
            hint="choose a smaller --input-len or --output-len",
        )
    cache = paths.ensure_trusted(paths.cache("peers"))
    runs = {system.name: GenerationRuns(error=system.error) for system in systems}
    with ExitStack() as stack:
        processes: dict[str, SystemProcess] = {}
        for system in systems:
            if not system.error:
                progress(f"starting {system.name}")
                process = stack.enter_context(system.start(model.path, cache))
                processes[system.name] = process
                with runs[system.name].recording_failure():
                    runs[system.name].ready = process.start()
        bandwidths = _run_rounds(processes, runs, model, task, progress)
        for name, process in processes.items():
            runs[name].memory = process.memory_bytes()
            runs[name].peak_memory = process.peak_memory_bytes()
    for of in runs.values():
        del of.generations[:1]
    return rows(runs, model, task, machine, _quantiles(bandwidths[1:])[1])


def _run_rounds(
    processes: Mapping[str, SystemProcess],
    runs: Mapping[str, GenerationRuns],
    model: ModelCost,
    task: GenerationTask,
    progress: Callable[[str], object],
) -> list[float]:
    """Run all rounds, the warm-up included; return the read bandwidth of each."""
    bandwidths: list[float] = []
    for index in range(task.rounds + 1):
        prompts = task.prompts(model.vocab_size, index)
        progress(f"round {index} of {task.rounds}: read bandwidth")
        bandwidths.append(read_bandwidth())
        for name, process in processes.items():
            progress(f"round {index} of {task.rounds}: {name}")
            if not runs[name].error:
                with runs[name].recording_failure():
                    runs[name].generations.append(process.generate(prompts, task.output_len))
    return bandwidths


def read_bandwidth() -> float:
    """Measure the bytes per second that reading memory gets now, as `ingot.bench.ops` does."""
    memory = allocate(2**28)
    read, size = make_probe(memory, memory.nbytes // 4)
    return size / time_call(read, 0.3, minimum=5).p50


def roofline(model: ModelCost, task: GenerationTask, machine: Peaks, bandwidth: float) -> float:
    """Return the tokens per second of an ideal system on this machine."""
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32", "int8") if model.is_quantized else ("bf16", "fp32")
    peaks = [peak.value for dtype in dtypes if (peak := machine.matmul[dtype])]
    flops = max(peaks) * 1e9 if peaks else None

    def seconds(tokens: int, keys: int) -> float:
        read = model.step.bytes + keys * model.kv_bytes
        cost = Cost(bytes=read, flops=tokens * model.step.flops)
        return Roofline.of(cost, bandwidth, flops).seconds

    batch_size, prompts = task.batch_size, task.batch_size * task.input_len
    steps = (seconds(batch_size, prompts + batch_size * done) for done in range(1, task.output_len))
    return batch_size * task.output_len / (seconds(prompts, prompts) + sum(steps))


def rows(
    runs: Mapping[str, GenerationRuns],
    model: ModelCost,
    task: GenerationTask,
    machine: Peaks,
    bandwidth: float,
) -> list[CompareRow]:
    """Summarize: one row per system, in the given order."""
    ideal = roofline(model, task, machine, bandwidth)
    successful = {name: of for name, of in runs.items() if of.ready and not of.error}
    first = next(iter(successful.values()), None)
    ours = successful.get(OURS)
    shared: dict[str, Any] = {
        "model": model.path.name,
        "batch_size": task.batch_size,
        "input_len": task.input_len,
        "output_len": task.output_len,
        "rounds": task.rounds,
        "read_gbs": round_measurement(bandwidth / 1e9),
        "roofline_tokens_per_s": round_measurement(ideal),
    }
    return [
        CompareRow(system=name, **shared, **_measurements(of, first, ours, task, ideal))
        if name in successful and first
        else CompareRow(system=name, **shared, error=of.error or "no result")
        for name, of in runs.items()
    ]


def count_matching(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix, over all sequences.

    >>> count_matching([[5, 6, 7], [1, 2, 3]], [[5, 6, 8], [1, 2, 3]])
    2
    """
    count = 0
    for left, right in zip(zip(*some, strict=True), zip(*others, strict=True), strict=True):
        if left != right:
            break
        count += 1
    return count


def _measurements(
    of: GenerationRuns,
    first: GenerationRuns,
    ours: GenerationRuns | None,
    task: GenerationTask,
    ideal: float,
) -> dict[str, Any]:
    assert of.ready
    low, usual, high = _quantiles(of.rates())
    speedups = _speedups(ours, of) if ours else (None, None, None)
    times = [g.ttft_seconds for g in of.generations if g.ttft_seconds]
    ttft = _quantiles(times)[1] if times else None
    return {
        "version": of.ready.version,
        "dtype": of.ready.dtype,
        "tokens_per_s": usual,
        "p20": low,
        "p80": high,
        "speedup_p20": speedups[0],
        "speedup": speedups[1],
        "speedup_p80": speedups[2],
        "ttft_ms": ttft and round_measurement(ttft * 1e3),
        "prefill_tokens_per_s": ttft and round_measurement(task.batch_size * task.input_len / ttft),
        "load_s": round_measurement(of.ready.load_seconds),
        "memory_mb": of.memory and round_measurement(of.memory / 1e6),
        "peak_memory_mb": of.peak_memory and round_measurement(of.peak_memory / 1e6),
        "matching_tokens": median_low(
            count_matching(a.tokens, b.tokens)
            for a, b in zip(of.generations, first.generations, strict=True)
        ),
        "roofline_fraction": round_measurement(usual / ideal),
    }


def _speedups(ours: GenerationRuns, of: GenerationRuns) -> tuple[float, float, float]:
    pairs = zip(ours.rates(), of.rates(), strict=True)
    return _quantiles([mine / theirs for mine, theirs in pairs])


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, usual, high = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
    return round_measurement(low), round_measurement(usual), round_measurement(high)
