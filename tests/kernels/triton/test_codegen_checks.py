"""The codegen checks pass for all kernels, and each detects an injected violation."""

from __future__ import annotations

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


def one_launch_of_each_kernel() -> list[CompileJob]:
    """Return a launch of each kernel for one target, a different one for the next kernel."""
    jobs: dict[str, list[CompileJob]] = {}
    for job in compile_jobs(all_configs=False):
        jobs.setdefault(job.kernel, []).append(job)
    return [
        next(job for job in of_kernel if job.target == target)
        for of_kernel, target in zip(jobs.values(), cycle(TARGETS), strict=False)
    ]


def test_every_kernel_passes_the_checks_on_a_target() -> None:
    kernels = compile_all(one_launch_of_each_kernel())
    assert {compiled.kernel for compiled in kernels} == {job.kernel for job in compile_jobs()}
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
    launch = launch_of("add_layer_norm", "backward")
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


def test_gemms_use_the_tensor_cores_of_each_generation() -> None:
    mnemonics = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
    jobs: dict[tuple[str, str], CompileJob] = {}
    for job in compile_jobs(("linear", "attention"), tuple(mnemonics), all_configs=False):
        if job.kernel in ("linear", "attention"):
            jobs.setdefault((job.kernel, job.target), job)
    assert len(jobs) == 2 * len(mnemonics)
    for compiled in compile_all(list(jobs.values())):
        prefix = mnemonics[compiled.target]
        assert any(name.startswith(prefix) for name in compiled.stats.tensor_ops), compiled


def test_int8_gemms_use_integer_tensor_core_instructions() -> None:
    mnemonics = {"sm_80": "IMMA", "sm_90": "IGMMA", "sm_100": "UTCIMMA", "gfx942": "v_mfma_i32"}
    jobs = [
        job
        for job in compile_jobs(("linear_int8_dynamic",), tuple(mnemonics), all_configs=False)
        if job.kernel == "linear_int8_dynamic"
    ]
    for compiled in compile_all(jobs):
        prefix = mnemonics[compiled.target]
        assert any(name.startswith(prefix) for name in compiled.stats.tensor_ops), compiled


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
