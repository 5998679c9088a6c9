"""Ahead-of-time compilation of kernels for GPUs that are not present.

    kernels = compile_all(compile_jobs(targets=["sm_90"]))

A job is one launch of an op's representative call, in one configuration, for one target. It takes
the same path as Triton's just-in-time compiler, from the arguments' dtypes, alignments and strides
to a binary. Jobs run in one process per core. Results are cached under a hash of everything that
went into them: the kernel's source and its callees, constants, options, target and Triton version.
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
    """One kernel to compile: which launch of which op, in which configuration, for which target."""

    op: str
    direction: str
    index: int
    """Index among the launches of the op's representative calls in that direction."""
    kernel: str
    config: KernelConfig
    target: str
    key: str
    """Hash of everything that determines the binary."""

    @property
    def name(self) -> str:
        """The name in tables, such as `linear.forward.linear.0`."""
        return f"{self.op}.{self.direction}.{self.kernel}.{self.index}"


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """The result of a job: resources and instruction counts of the binary."""

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
    def uses_tensor_cores(self) -> bool:
        """Whether the code contains tensor-core instructions."""
        return bool(self.stats.tensor_ops)

    @property
    def row(self) -> dict[str, Any]:
        """The row that `ingot kernels --json` prints."""
        return {
            "kernel": self.name,
            "bound_by": self.bound_by,
            "target": self.target,
            "config": self.config,
            "registers": self.stats.registers,
            "spills": self.stats.spills,
            "shared_bytes": self.shared_bytes,
            "occupancy": self.occupancy,
            "uses_tensor_cores": self.uses_tensor_cores,
            "tensor_ops": self.stats.tensor_ops,
            "load_bits": self.stats.loads,
            "store_bits": self.stats.stores,
            "async_copies": self.stats.async_copies,
        }


def compile_jobs(
    names: Sequence[str] = (),
    targets: Sequence[str] = tuple(TARGETS),
    all_configs: bool = True,
) -> list[CompileJob]:
    """Return the jobs for these ops (all if none is named), without duplicates.

    With `all_configs`, every configuration of the tuning space; else only the default one.
    """
    if interpreting():
        raise IngotError(
            "kernels cannot be compiled while TRITON_INTERPRET is set",
            hint="unset TRITON_INTERPRET",
        )
    jobs: dict[str, CompileJob] = {}
    for name, triton_op in triton_ops().items():
        if names and name not in names:
            continue
        for direction in ("forward", "backward"):
            for index, launch in enumerate(triton_op.launches(direction)):
                for job in _launch_jobs(name, direction, index, launch, targets, all_configs):
                    jobs.setdefault(job.key, job)
    return list(jobs.values())


def _launch_jobs(
    op: str,
    direction: str,
    index: int,
    launch: Launch,
    targets: Sequence[str],
    all_configs: bool,
) -> Iterable[CompileJob]:
    for target in targets:
        spec = TARGETS[target]
        configs = launch.configs(spec) if all_configs else [default_config(launch, target)]
        for config in configs:
            yield CompileJob(
                op=op,
                direction=direction,
                index=index,
                kernel=launch.kernel.name,
                config=config,
                target=target,
                key=_key(launch, config, spec),
            )


def compile_all(
    jobs: Sequence[CompileJob], on_done: Callable[[], object] = lambda: None
) -> list[CompiledKernel]:
    """Compile the jobs that are not cached; call `on_done` after each."""
    results = {job.key: cached for job in jobs if (cached := _load(job)) is not None}
    for _ in results:
        on_done()
    missing = [job for job in jobs if job.key not in results]
    if len(missing) < 4:
        results |= _collect(missing, map(compile_one, missing), on_done)
    else:
        num_workers = min(detect().cpu.cores, len(missing))
        with (
            tempfile.TemporaryDirectory() as scratch,
            ProcessPoolExecutor(
                num_workers, get_context("spawn"), _init_worker, (scratch,)
            ) as pool,
        ):
            results |= _collect(missing, pool.map(compile_one, missing), on_done)
    return [results[job.key] for job in jobs]


def _collect(
    jobs: Sequence[CompileJob],
    kernels: Iterable[CompiledKernel],
    on_done: Callable[[], object],
) -> dict[str, CompiledKernel]:
    results: dict[str, CompiledKernel] = {}
    for job, compiled in zip(jobs, kernels, strict=True):
        results[job.key] = compiled
        paths.write_atomic(_path(job), msgspec.json.encode(compiled))
        on_done()
    return results


def _init_worker(scratch: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = scratch
    os.nice(5)


def compile_one(job: CompileJob) -> CompiledKernel:
    """Compile one job and read its machine code."""
    launch = triton_ops()[job.op].launches(job.direction)[job.index]
    binary = compile_launch(launch, job.config, TARGETS[job.target])
    return inspect_binary(job.name, launch, job.config, TARGETS[job.target], binary)


def inspect_binary(
    name: str, launch: Launch, config: KernelConfig, target: TargetSpec, binary: Any
) -> CompiledKernel:
    """Return the resources and instruction counts of a compiled launch."""
    if target.backend == "cuda":
        stats = disassembly.read_cubin(binary.asm["cubin"])
    else:
        stats = disassembly.parse_gcn(binary.asm["amdgcn"])
    shared_bytes = binary.metadata.shared
    return CompiledKernel(
        name=name,
        kernel=launch.kernel.name,
        bound_by=launch.kernel.bound_by,
        scalar_loads=launch.kernel.scalar_loads,
        target=target.name,
        config=str(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        shared_bytes=shared_bytes,
        occupancy=target.occupancy(stats.registers, shared_bytes, config.num_warps),
        stats=stats,
    )


def compile_launch(launch: Launch, config: KernelConfig, target: TargetSpec) -> Any:
    """Return Triton's compiled kernel with the output of every compiler stage."""
    source, options, gpu = _source(launch, config, target)
    return triton.compile(source, target=gpu, options=options)


def _source(
    launch: Launch, config: KernelConfig, target: TargetSpec
) -> tuple[ASTSource, Any, GPUTarget]:
    """Return what Triton's just-in-time compiler would compile for these arguments."""
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    backend = make_backend(gpu)
    function = launch.kernel.function
    constants = {**launch.constants, **config.options, **PINNED_OPTIONS}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound_args, specialization, options = bind(*launch.args, **constants)
    options, signature, constexprs, attributes = function._pack_args(
        backend, constants, bound_args, specialization, options
    )
    return ASTSource(function, signature, constexprs, attributes), options.__dict__, gpu


def _key(launch: Launch, config: KernelConfig, target: TargetSpec) -> str:
    source, options, _ = _source(launch, config, target)
    inputs = (source.hash(), sorted(map(str, options.items())), target, triton.__version__)
    return hashlib.sha256(f"{inputs}{_reader_hash()}".encode()).hexdigest()[:32]


@cache
def _reader_hash() -> str:
    """Hash of the code that reads binaries: when it changes, cached results are recomputed."""
    folder = Path(__file__).parent
    names = "disassembly.py", "compiler.py", "target.py"
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def _path(job: CompileJob) -> Path:
    return paths.cache("triton", f"{job.key}.json")


def _load(job: CompileJob) -> CompiledKernel | None:
    try:
        cached = msgspec.json.decode(_path(job).read_bytes(), type=CompiledKernel)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
    return msgspec.convert({**asdict(cached), "name": job.name}, CompiledKernel)
