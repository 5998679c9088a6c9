"""Compiles kernels ahead of time, for GPUs that are not there, and says what came out.

    facts = compile_all(jobs(targets=["sm_90"]))

A job is one launch of an op's representative call, in one configuration, for one target. It takes
the way that Triton's own just-in-time compiler takes, from the arguments' dtypes, alignments and
strides to a binary. Jobs run in processes, as many as there are cores. Facts are kept under a hash
of all that went into them: the kernel's source and what it calls, its constants, its options,
target and Triton.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ingot.core import paths
from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.kernels.triton import code, interpreting
from ingot.kernels.triton.code import Code
from ingot.kernels.triton.kernel import PINNED, Config, Launch
from ingot.kernels.triton.provider import provided
from ingot.kernels.triton.target import TARGETS, Target
from ingot.kernels.triton.tuned import default


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel to compile: which launch of which op, how, and what for."""

    op: str
    direction: str
    index: int
    """Among the launches of the op's representative call in that direction."""
    kernel: str
    config: Config
    target: str
    key: str
    """Hash of all that goes into it."""

    @property
    def name(self) -> str:
        """As tables show it: `linear.matmul`, `linear.backward.matmul.1`."""
        return f"{self.op}.{self.direction}.{self.kernel}.{self.index}"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What came out of a job."""

    name: str
    kernel: str
    bound: str
    scalars: int
    target: str
    config: str
    warps: int
    stages: int
    shared_bytes: int
    occupancy: float
    code: Code

    @property
    def tensor_core(self) -> bool:
        """Whether there are instructions of the tensor cores."""
        return bool(self.code.tensor)

    @property
    def row(self) -> dict[str, Any]:
        """As `ingot kernels --json` prints it."""
        return {
            "kernel": self.name,
            "bound": self.bound,
            "target": self.target,
            "config": self.config,
            "registers": self.code.registers,
            "spills": self.code.spills,
            "shared_bytes": self.shared_bytes,
            "occupancy": self.occupancy,
            "tensor_core": self.tensor_core,
            "tensor_instructions": self.code.tensor,
            "load_bits": self.code.loads,
            "store_bits": self.code.stores,
            "async_copies": self.code.copies,
        }


def jobs(
    names: Sequence[str] = (),
    targets: Sequence[str] = tuple(TARGETS),
    every_config: bool = True,
) -> list[Job]:
    """All there is to compile for these ops, all if none is named; every launch once.

    Without `every_config` it is the one that dispatch takes.
    """
    if interpreting():
        raise IngotError(
            "kernels cannot be compiled while TRITON_INTERPRET is set", hint="unset it"
        )
    found: dict[str, Job] = {}
    for name, one in provided().items():
        if names and name not in names:
            continue
        for direction in ("forward", "backward"):
            for index, launch in enumerate(one.launches(direction)):
                for target in targets:
                    configs = launch.configs(TARGETS[target])
                    for config in configs if every_config else [default(launch, target)]:
                        key = _key(launch, config, TARGETS[target])
                        job = Job(
                            op=name,
                            direction=direction,
                            index=index,
                            kernel=launch.kernel.name,
                            config=config,
                            target=target,
                            key=key,
                        )
                        found.setdefault(key, job)
    return list(found.values())


def compile_all(wanted: Sequence[Job], done: Callable[[], object] = lambda: None) -> list[Fact]:
    """Compile them; what is known already is not compiled again. `done` hears of each."""
    known = {job.key: fact for job in wanted if (fact := _load(job)) is not None}
    for _ in known:
        done()
    missing = [job for job in wanted if job.key not in known]
    if len(missing) < 4:
        new: Iterable[Fact] = map(compile_one, missing)
        known |= _collect(missing, new, done)
    else:
        with (
            tempfile.TemporaryDirectory() as scratch,
            ProcessPoolExecutor(
                min(detect().cpu.cores, len(missing)),
                get_context("spawn"),
                _start,
                (scratch,),
            ) as pool,
        ):
            known |= _collect(missing, pool.map(compile_one, missing), done)
    return [known[job.key] for job in wanted]


def _collect(
    wanted: Sequence[Job], facts: Iterable[Fact], done: Callable[[], object]
) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for job, fact in zip(wanted, facts, strict=True):
        found[job.key] = fact
        paths.write_atomic(_path(job), msgspec.json.encode(fact))
        done()
    return found


def _start(scratch: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = scratch
    os.nice(5)


def compile_one(job: Job) -> Fact:
    """Compile one and read its code."""
    launch = provided()[job.op].launches(job.direction)[job.index]
    compiled = compile_launch(launch, job.config, TARGETS[job.target])
    return fact_of(job.name, launch, job.config, TARGETS[job.target], compiled)


def fact_of(name: str, launch: Launch, config: Config, target: Target, compiled: Any) -> Fact:
    """What came out of the compiler."""
    if target.backend == "cuda":
        found = code.read_cubin(compiled.asm["cubin"])
    else:
        found = code.parse_gcn(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return Fact(
        name=name,
        kernel=launch.kernel.name,
        bound=launch.kernel.bound,
        scalars=launch.kernel.scalars,
        target=target.name,
        config=str(config),
        warps=config.warps,
        stages=config.stages,
        shared_bytes=shared,
        occupancy=target.occupancy(found.registers, shared, config.warps),
        code=found,
    )


def compile_launch(launch: Launch, config: Config, target: Target) -> Any:
    """The binary of a launch, and all stages before it."""
    source, options, gpu = _source(launch, config, target)
    return triton.compile(source, target=gpu, options=options)


def _source(launch: Launch, config: Config, target: Target) -> tuple[ASTSource, Any, GPUTarget]:
    """What Triton's just-in-time compiler would compile for these arguments."""
    gpu = GPUTarget(target.backend, target.arch, target.lanes)
    backend = make_backend(gpu)
    function = launch.kernel.function
    constants = {**launch.constants, **config.options, **PINNED}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*launch.args, **constants)
    options, signature, constexprs, attributes = function._pack_args(
        backend, constants, bound, specialization, options
    )
    return ASTSource(function, signature, constexprs, attributes), options.__dict__, gpu


def _key(launch: Launch, config: Config, target: Target) -> str:
    source, options, _ = _source(launch, config, target)
    facts = (source.hash(), sorted(map(str, options.items())), target, triton.__version__)
    return hashlib.sha256(f"{facts}{_reader()}".encode()).hexdigest()[:32]


@cache
def _reader() -> str:
    """What reads the code goes into the key: facts that were read otherwise are read again."""
    here = Path(__file__).parent
    texts = [(here / name).read_bytes() for name in ("code.py", "compiler.py", "target.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _path(job: Job) -> Path:
    return paths.cache("triton", f"{job.key}.json")


def _load(job: Job) -> Fact | None:
    try:
        fact = msgspec.json.decode(_path(job).read_bytes(), type=Fact)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
    return msgspec.convert({**asdict(fact), "name": job.name}, Fact)
