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
from ingot.kernels.triton import disassembly, interpreting
from ingot.kernels.triton.config_store import default_config
from ingot.kernels.triton.disassembly import CodeStats
from ingot.kernels.triton.launch import PINNED_OPTIONS, KernelConfig, Launch
from ingot.kernels.triton.provider import triton_ops
from ingot.kernels.triton.target import TARGETS, TargetSpec


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One kernel to compile: which launch of which op, how, and what for."""

    op: str
    direction: str
    index: int
    """Among the launches of the op's representative call in that direction."""
    kernel: str
    config: KernelConfig
    target: str
    key: str
    """Hash of all that goes into it."""

    @property
    def name(self) -> str:
        """As tables show it: `linear.matmul`, `linear.backward.matmul.1`."""
        return f"{self.op}.{self.direction}.{self.kernel}.{self.index}"


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What came out of a job."""

    name: str
    kernel: str
    bound_by: str
    scalar_loads: int
    target: str
    config: str
    num_warps: int
    num_stages: int
    shared_bytes: int
    occupancy: float
    stats: CodeStats

    @property
    def tensor_core(self) -> bool:
        """Whether there are instructions of the tensor cores."""
        return bool(self.stats.tensor_ops)

    @property
    def row(self) -> dict[str, Any]:
        """As `ingot kernels --json` prints it."""
        return {
            "kernel": self.name,
            "bound": self.bound_by,
            "target": self.target,
            "config": self.config,
            "registers": self.stats.registers,
            "spills": self.stats.spills,
            "shared_bytes": self.shared_bytes,
            "occupancy": self.occupancy,
            "tensor_core": self.tensor_core,
            "tensor_instructions": self.stats.tensor_ops,
            "load_bits": self.stats.loads,
            "store_bits": self.stats.stores,
            "async_copies": self.stats.async_copies,
        }


def jobs(
    names: Sequence[str] = (),
    targets: Sequence[str] = tuple(TARGETS),
    every_config: bool = True,
) -> list[CompileJob]:
    """All there is to compile for these ops, all if none is named; every launch once.

    Without `every_config` it is the one that dispatch takes.
    """
    if interpreting():
        raise IngotError(
            "kernels cannot be compiled while TRITON_INTERPRET is set", hint="unset it"
        )
    found: dict[str, CompileJob] = {}
    for name, one in triton_ops().items():
        if names and name not in names:
            continue
        for direction in ("forward", "backward"):
            for index, launch in enumerate(one.launches(direction)):
                for target in targets:
                    configs = launch.configs(TARGETS[target])
                    for config in configs if every_config else [default_config(launch, target)]:
                        key = _key(launch, config, TARGETS[target])
                        job = CompileJob(
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


def compile_all(
    wanted: Sequence[CompileJob], done: Callable[[], object] = lambda: None
) -> list[CompiledKernel]:
    """Compile them; what is known already is not compiled again. `done` hears of each."""
    known = {job.key: fact for job in wanted if (fact := _load(job)) is not None}
    for _ in known:
        done()
    missing = [job for job in wanted if job.key not in known]
    if len(missing) < 4:
        new: Iterable[CompiledKernel] = map(compile_one, missing)
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
    wanted: Sequence[CompileJob], facts: Iterable[CompiledKernel], done: Callable[[], object]
) -> dict[str, CompiledKernel]:
    found: dict[str, CompiledKernel] = {}
    for job, fact in zip(wanted, facts, strict=True):
        found[job.key] = fact
        paths.write_atomic(_path(job), msgspec.json.encode(fact))
        done()
    return found


def _start(scratch: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = scratch
    os.nice(5)


def compile_one(job: CompileJob) -> CompiledKernel:
    """Compile one and read its code."""
    launch = triton_ops()[job.op].launches(job.direction)[job.index]
    compiled = compile_launch(launch, job.config, TARGETS[job.target])
    return inspect_binary(job.name, launch, job.config, TARGETS[job.target], compiled)


def inspect_binary(
    name: str, launch: Launch, config: KernelConfig, target: TargetSpec, compiled: Any
) -> CompiledKernel:
    """What came out of the compiler."""
    if target.backend == "cuda":
        found = disassembly.read_cubin(compiled.asm["cubin"])
    else:
        found = disassembly.parse_gcn(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return CompiledKernel(
        name=name,
        kernel=launch.kernel.name,
        bound_by=launch.kernel.bound_by,
        scalar_loads=launch.kernel.scalar_loads,
        target=target.name,
        config=str(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        shared_bytes=shared,
        occupancy=target.occupancy(found.registers, shared, config.num_warps),
        stats=found,
    )


def compile_launch(launch: Launch, config: KernelConfig, target: TargetSpec) -> Any:
    """The binary of a launch, and all stages before it."""
    source, options, gpu = _source(launch, config, target)
    return triton.compile(source, target=gpu, options=options)


def _source(
    launch: Launch, config: KernelConfig, target: TargetSpec
) -> tuple[ASTSource, Any, GPUTarget]:
    """What Triton's just-in-time compiler would compile for these arguments."""
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    backend = make_backend(gpu)
    function = launch.kernel.function
    constants = {**launch.constants, **config.options, **PINNED_OPTIONS}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*launch.args, **constants)
    options, signature, constexprs, attributes = function._pack_args(
        backend, constants, bound, specialization, options
    )
    return ASTSource(function, signature, constexprs, attributes), options.__dict__, gpu


def _key(launch: Launch, config: KernelConfig, target: TargetSpec) -> str:
    source, options, _ = _source(launch, config, target)
    facts = (source.hash(), sorted(map(str, options.items())), target, triton.__version__)
    return hashlib.sha256(f"{facts}{_reader()}".encode()).hexdigest()[:32]


@cache
def _reader() -> str:
    """What reads the code goes into the key: facts that were read otherwise are read again."""
    here = Path(__file__).parent
    texts = [(here / name).read_bytes() for name in ("disassembly.py", "compiler.py", "target.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _path(job: CompileJob) -> Path:
    return paths.cache("triton", f"{job.key}.json")


def _load(job: CompileJob) -> CompiledKernel | None:
    try:
        fact = msgspec.json.decode(_path(job).read_bytes(), type=CompiledKernel)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
    return msgspec.convert({**asdict(fact), "name": job.name}, CompiledKernel)
