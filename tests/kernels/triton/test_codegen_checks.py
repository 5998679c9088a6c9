"""The codegen checks pass for all kernels, and each detects an injected violation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from ingot.kernels.triton.codegen_checks import violations
from ingot.kernels.triton.compiler import (
    CompiledKernel,
    CompileJob,
    compile_all,
    compile_jobs,
    compile_launch,
    inspect_binary,
)
from ingot.kernels.triton.config_store import default_config
from ingot.kernels.triton.launch import KernelConfig, Launch, record_launches
from ingot.kernels.triton.provider import ExampleInputs, triton_ops
from ingot.kernels.triton.report import all_violations
from ingot.kernels.triton.target import TARGETS

GEMM_MNEMONICS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
# Half of the combinations, each generation once; the slow tier compiles all.
SAMPLED_GEMMS = {("linear", "sm_80"), ("attention", "sm_90"), ("linear", "sm_100"),
                 ("attention", "gfx942")}  # fmt: skip


@cache
def default_jobs() -> list[CompileJob]:
    return compile_jobs(all_configs=False)


def compile_here(jobs: list[CompileJob]) -> list[CompiledKernel]:
    """Compile three at a time, as `compile_all` starts processes from four on.

    Each of them would import torch and Triton, while the other cores are busy with other tests.
    """
    batches = [jobs[begin : begin + 3] for begin in range(0, len(jobs), 3)]
    return [compiled for batch in batches for compiled in compile_all(batch)]


def one_launch_of_each_kernel() -> list[CompileJob]:
    """Return a launch of each kernel for one target, a different one for the next kernel."""
    jobs: dict[str, list[CompileJob]] = {}
    for job in default_jobs():
        jobs.setdefault(job.kernel, []).append(job)
    return [
        next(job for job in of_kernel if job.target == target)
        for of_kernel, target in zip(jobs.values(), cycle(TARGETS), strict=False)
    ]


def test_every_kernel_passes_the_checks_on_a_target() -> None:
    kernels = compile_here(one_launch_of_each_kernel())
    assert {compiled.kernel for compiled in kernels} == {
        launch.kernel.name
        for triton_op in triton_ops().values()
        for direction in ("forward", "backward")
        for launch in triton_op.launches(direction)
    }
    assert {compiled.target for compiled in kernels} == set(TARGETS)
    assert all_violations(kernels) == []


@pytest.mark.slow
def test_every_configuration_of_every_launch_passes_the_checks() -> None:
    assert all_violations(compile_all(compile_jobs())) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_compile_without_spills(dtype: torch.dtype) -> None:
    """The other tests compile bfloat16. float32 does not use tensor cores."""
    for triton_op in triton_ops().values():
        for direction in ("forward", "backward"):
            for launch in triton_op.launches(direction, dtype)[:1]:
                compiled = compile_for(launch, default_config(launch, "sm_90"))
                assert not compiled.stats.spills, compiled


def compile_for(launch: Launch, config: KernelConfig, target: str = "sm_90") -> CompiledKernel:
    binary = compile_launch(launch, config, TARGETS[target])
    return inspect_binary("injected", launch, config, TARGETS[target], binary)


def launch_of(op: str, direction: str = "forward", *args: Any) -> Launch:
    if not args:
        return triton_ops()[op].launches(direction)[0]
    with record_launches() as launches:
        triton_ops()[op].forward(*args)
    return launches[0]


def test_spills_are_a_violation() -> None:
    launch = launch_of("rms_norm", "backward")
    compiled = compile_for(launch, KernelConfig.of(1))
    assert any("register spills" in violation for violation in violations(compiled))


def test_narrow_loads_are_a_violation() -> None:
    make = ExampleInputs()
    launch = launch_of("rms_norm", "forward", make(64, 4099)[:, :4096], make(4096), 1e-6)
    compiled = compile_for(launch, launch.configs(TARGETS["sm_90"])[0])
    assert any("less than 128 bits" in violation for violation in violations(compiled)), compiled


def test_missing_tensor_core_instructions_are_a_violation() -> None:
    make = ExampleInputs(torch.float32)
    launch = launch_of("linear", "forward", make(512, 512), make(512, 512), None, 0, None)
    config = launch.configs(TARGETS["sm_90"])[0]
    compiled = compile_for(launch, config)
    assert any("tensor-core" in violation for violation in violations(compiled))


def test_too_much_shared_memory_is_a_violation() -> None:
    config = KernelConfig.of(8, 6, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64)
    compiled = compile_for(launch_of("linear"), config)
    assert any("shared memory" in violation for violation in violations(compiled))


def gemm_jobs() -> dict[tuple[str, str], CompileJob]:
    """Return the first launch of each of two kernels for each generation of tensor cores."""
    jobs: dict[tuple[str, str], CompileJob] = {}
    for job in default_jobs():
        if job.kernel in ("linear", "attention") and job.target in GEMM_MNEMONICS:
            jobs.setdefault((job.kernel, job.target), job)
    assert len(jobs) == 2 * len(GEMM_MNEMONICS)
    return jobs


def assert_all_use(mnemonics: Mapping[str, str], kernels: Sequence[CompiledKernel]) -> None:
    assert {compiled.target for compiled in kernels} == set(mnemonics)
    for compiled in kernels:
        prefix = mnemonics[compiled.target]
        assert any(name.startswith(prefix) for name in compiled.stats.tensor_ops), compiled


def test_gemms_use_the_tensor_cores_of_each_generation() -> None:
    jobs = [job for key, job in gemm_jobs().items() if key in SAMPLED_GEMMS]
    assert_all_use(GEMM_MNEMONICS, compile_here(jobs))


@pytest.mark.slow
def test_each_gemm_uses_the_tensor_cores_of_each_generation() -> None:
    assert_all_use(GEMM_MNEMONICS, compile_all(list(gemm_jobs().values())))


def test_int8_gemms_use_integer_tensor_core_instructions() -> None:
    mnemonics = {"sm_80": "IMMA", "sm_90": "IGMMA", "sm_100": "UTCIMMA", "gfx942": "v_mfma_i32"}
    jobs = [
        job
        for job in default_jobs()
        if job.kernel == "linear_int8_dynamic" and job.target in mnemonics
    ]
    assert_all_use(mnemonics, compile_here(jobs))


def test_linear_cross_entropy_does_not_materialize_the_logits() -> None:
    make, num_tokens, dim, vocab_size = ExampleInputs(), 8192, 512, 131072
    hidden, weight = make(num_tokens, dim), make(vocab_size, dim)
    triton_op = triton_ops()["linear_cross_entropy"]
    with record_launches() as launches:
        args = hidden, weight, make.ints(num_tokens)
        triton_op.forward(*triton_op.op.with_defaults(args))
    assert launches
    for launch in launches:
        sizes = [arg.numel() for arg in launch.args if isinstance(arg, torch.Tensor)]
        assert max(sizes) < num_tokens * vocab_size // 8
