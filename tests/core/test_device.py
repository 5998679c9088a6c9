"""Facts of this machine, and of machines that we only have the texts of.

The Xeon's text was captured on the machine that tests ingot and shortened; the others follow
the format of the kernels for those machines.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ingot.core import device
from ingot.core.device import Compiler, Cpu, Device, Gpu
from ingot.core.errors import IngotError, UnknownName

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Processor
cpu MHz		: 2100.000
physical id	: 0
core id		: 0
flags		: fpu sse4_2 fma f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx_vnni \
avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8

processor	: 1
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Processor
cpu MHz		: 2100.000
physical id	: 0
core id		: 1
flags		: fpu sse4_2 fma f16c avx2
"""

# Two sockets of two cores of two threads: the second threads are numbered last.
EPYC = "\n\n".join(
    f"""\
processor	: {cpu}
model name	: AMD EPYC 7763 64-Core Processor
physical id	: {cpu % 4 // 2}
core id		: {cpu % 2}
flags		: fpu vme sse4_2 fma movbe avx f16c avx2 sha_ni vaes"""
    for cpu in range(8)
)

NEOVERSE = "\n\n".join(
    f"""\
processor	: {cpu}
BogoMIPS	: 243.75
Features	: fp asimd evtstrm aes fphp asimdhp asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: 0xd0c"""
    for cpu in range(4)
)

EXAMPLE = Device(
    cpu=Cpu(
        name="Intel(R) Xeon(R) Processor",
        architecture="x86_64",
        cores=2,
        threads=4,
        isa=("avx2", "portable"),
        int8=("avx_vnni",),
        l1d=49152,
        l2=2097152,
        l3=314572800,
    ),
    memory=24 << 30,
    gpus=(Gpu(type="cuda", name="NVIDIA H100", memory=80 << 30, capability="sm_90"),),
    compiler=Compiler(path="/usr/bin/g++", name="gcc", version="12.2.0"),
    system="Linux",
    torch="2.13.0+cpu",
)


def variants(value: Any) -> Iterator[Any]:
    """Yield values that differ from `value` in one fact, whatever its type."""
    match value:
        case int():
            yield value + 1
        case str():
            yield value + "x"
        case tuple():
            items = cast(tuple[Any, ...], value)
            yield items[1:]
            yield (*items, *items)
            for i, item in enumerate(items):
                for other in variants(item):
                    yield (*items[:i], other, *items[i + 1 :])
        case _:
            assert dataclasses.is_dataclass(value), f"teach this test to change {value!r}"
            for field in dataclasses.fields(value):
                others = list(variants(getattr(value, field.name)))
                if "None" in str(field.type):
                    others.append(None)
                for other in others:
                    yield dataclasses.replace(value, **{field.name: other})  # type: ignore[type-var]


def test_the_fingerprint_changes_with_every_fact() -> None:
    all_devices = [EXAMPLE, *variants(EXAMPLE)]
    assert len(all_devices) > len(dataclasses.fields(Cpu)) + len(dataclasses.fields(Gpu))
    for one, other in itertools.combinations(all_devices, 2):
        assert one != other
        assert one.fingerprint != other.fingerprint


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    script = """
import sys
from ingot.core import device
assert "torch" not in sys.modules, "importing core must not import torch"
print(device.detect().fingerprint)
import torch
assert not torch.cuda.is_initialized()
"""
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == device.detect().fingerprint


def test_this_machine_is_described_in_full() -> None:
    found = device.detect()
    assert found is device.detect()
    assert found.cpu.name != "unknown"
    assert 1 <= found.cpu.cores <= found.cpu.threads <= (os.cpu_count() or 1)
    assert found.cpu.isa[-1] == "portable"
    assert found.cpu.l1d is not None
    assert found.cpu.l2 is not None
    assert 2**13 < found.cpu.l1d < found.cpu.l2 < found.memory
    assert found.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.torch == torch.__version__


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the kernel says and torch says")
def test_the_kernel_and_torch_agree_about_this_cpu() -> None:
    ours = device.parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    theirs = device.parse_capabilities(torch.cpu.get_capabilities())
    assert device.isa_tiers(ours.flags) == device.isa_tiers(theirs.flags)
    everything = range(os.cpu_count() or 1)
    assert device.count_usable_cores(ours.core_of, everything, None) == device.count_usable_cores(
        theirs.core_of, everything, None
    )


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and AMX are Linux's to grant")
def test_a_process_that_is_given_less_says_less() -> None:
    # With a signal stack too small for tile registers, the kernel does not grant them.
    script = """
import ctypes, os
class Stack(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8000)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from ingot.core.device import detect
cpu = detect().cpu
print(cpu.cores, cpu.threads, *cpu.isa, *cpu.int8)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    cpu = device.detect().cpu
    rest = [name for name in cpu.isa + cpu.int8 if not name.startswith("amx")]
    assert done.stdout.split() == ["1", "1", *rest]


@pytest.mark.parametrize(
    ("text", "name", "tiers", "counts"),
    [
        (
            XEON,
            "Intel(R) Xeon(R) Processor",
            ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"),
            (2, 2),
        ),
        (EPYC, "AMD EPYC 7763 64-Core Processor", ("avx2", "portable"), (4, 8)),
        (NEOVERSE, "0x41 0xd0c", ("portable",), (4, 4)),
        ("", "unknown", ("portable",), (1, 1)),
    ],
)
def test_other_machines(
    text: str, name: str, tiers: tuple[str, ...], counts: tuple[int, int]
) -> None:
    processor = device.parse_cpuinfo(text)
    assert processor.name == name
    assert device.isa_tiers(processor.flags) == tiers
    assert device.count_usable_cores(processor.core_of, range(64), None) == counts


def test_a_tier_needs_all_below_it() -> None:
    flags = set(device.parse_cpuinfo(XEON).flags)
    assert device.isa_tiers(flags - {"avx512vl"}) == ("avx2", "portable")
    assert device.isa_tiers(flags - {"fma"}) == ("portable",)


def test_a_tier_can_be_forced() -> None:
    tiers = ("avx512", "avx2", "portable")
    assert device.limit_isa_tiers(tiers, None) == device.limit_isa_tiers(tiers, "") == tiers
    assert device.limit_isa_tiers(tiers, "avx512") == tiers
    assert device.limit_isa_tiers(tiers, "portable") == ("portable",)


@pytest.mark.parametrize(
    ("wanted", "what", "hint"),
    [
        ("avx22", "unknown INGOT_ISA 'avx22'", "did you mean 'avx2'?"),
        (
            "amx",
            "INGOT_ISA: expected a tier of this CPU, got 'amx'",
            "choose one of avx2, portable",
        ),
    ],
)
def test_a_tier_that_cannot_be_is_an_error_with_a_hint(wanted: str, what: str, hint: str) -> None:
    with pytest.raises(IngotError) as raised:
        device.limit_isa_tiers(("avx2", "portable"), wanted)
    assert raised.value.message == what
    assert hint in raised.value.hint


@pytest.mark.parametrize("tier", ["portable", "nonsense"])
def test_the_environment_forces_a_tier(tier: str) -> None:
    script = "from ingot.core.device import detect; print(*detect().cpu.isa)"
    environment = {**os.environ, "INGOT_ISA": tier}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if tier == "portable":
        assert done.stdout == "portable\n"
    else:
        assert "unknown INGOT_ISA 'nonsense'" in done.stderr


@pytest.mark.parametrize(
    ("allowed", "quota", "counts"),
    [
        ({0, 4}, None, (1, 2)),  # two threads of one core
        ({0, 1}, None, (2, 2)),
        ({0, 2, 6}, None, (2, 3)),  # a core of either socket, the second with both threads
        (range(8), 2.5, (2, 2)),
        (range(8), 6.0, (4, 6)),
        (range(8), 0.5, (1, 1)),
        ({0, 4}, 100.0, (1, 2)),
    ],
)
def test_affinity_and_quota_limit_the_counts(
    allowed: set[int], quota: float | None, counts: tuple[int, int]
) -> None:
    assert device.count_usable_cores(device.parse_cpuinfo(EPYC).core_of, allowed, quota) == counts


def test_capabilities_without_names_and_counts_still_describe_a_cpu() -> None:
    apple = device.parse_capabilities(
        {"architecture": "arm64", "neon": True, "sve": False, "cpu_name": "Apple M3",
         "num_physical_cores": 8, "num_logical_cores": 8, "sve_max_length": 1}
    )  # fmt: skip
    assert (apple.name, apple.flags, len(apple.core_of)) == ("Apple M3", {"neon"}, 8)
    laptop = device.parse_capabilities({"num_physical_cores": 2, "num_logical_cores": 4})
    assert device.count_usable_cores(laptop.core_of, range(4), None) == (2, 4)
    assert device.parse_capabilities({}).core_of


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_instruction_caches_do_not_count_as_data_caches(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [("1", "Instruction", "64K"), ("1", "Data", "32K"), ("1", "Instruction", "64K"),
         ("2", "Unified", "1024K"), ("3", "Unified", "")]
    ):  # fmt: skip
        write(tmp_path / f"index{index}", {"level": level, "type": kind, "size": size})
    assert device.read_data_caches(tmp_path) == {"1": 2**15, "2": 2**20}
    assert device.read_data_caches(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("", {}, (None, None)),
        ("0::/", {}, (None, None)),
        ("0::/", {"cpu.max": "150000 100000", "memory.max": "1024"}, (1.5, 1024)),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/b/memory.max": "max"}, (None, None)),
        # The tightest of the group's own limits and those above it holds.
        (
            "0::/a/b",
            {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000", "a/b/memory.max": "7"},
            (2.0, 7),
        ),
        # Docker without a cgroup namespace: the path is the host's, the mount our own group.
        ("0::/docker/1f", {"cpu.max": "50000 100000", "memory.max": "99"}, (0.5, 99)),
        ("0::/../sibling", {"memory.max": "5"}, (None, 5)),
        (
            "4:memory:/x\n3:cpuset:/\n2:cpu,cpuacct:/x\n1:name=systemd:/x\n0::/",
            {
                "memory/x/memory.limit_in_bytes": "4096",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu/x/cpu.cfs_quota_us": "300000",
                "cpu/x/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            (3.0, 4096),
        ),
    ],
)
def test_cgroups_limit_the_process(
    tmp_path: Path,
    membership: str,
    files: dict[str, str],
    limits: tuple[float | None, int | None],
) -> None:
    write(tmp_path, files)
    assert device.cgroup_limits(tmp_path, membership) == limits


def fake_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str, module: object) -> None:
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def test_cuda_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        SimpleNamespace(name="NVIDIA H100", total_memory=80, major=9, minor=0),
        SimpleNamespace(name="NVIDIA A100", total_memory=40, major=8, minor=0),
    ]
    fake_accelerator(monkeypatch, "cuda", SimpleNamespace(get_device_properties=cards.__getitem__))
    assert device.detect_gpus() == (
        Gpu(type="cuda", name="NVIDIA H100", memory=80, capability="sm_90"),
        Gpu(type="cuda", name="NVIDIA A100", memory=40, capability="sm_80"),
    )


ARCH = "gfx942:sramecc+:xnack-"


def test_rocm_devices_are_known_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="MI300X", total_memory=192, major=9, minor=4, gcnArchName=ARCH)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    cards = [card, card]
    fake_accelerator(monkeypatch, "cuda", SimpleNamespace(get_device_properties=cards.__getitem__))
    expected = Gpu(type="cuda", name="MI300X", memory=192, capability="gfx942")
    assert device.detect_gpus() == (expected, expected)


def test_an_accelerator_without_properties_is_known_by_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_accelerator(monkeypatch, "mps", SimpleNamespace())
    expected = Gpu(type="mps", name="mps", memory=None, capability=None)
    assert device.detect_gpus() == (expected, expected)


def test_without_an_accelerator_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert device.detect_gpus() == ()


GCC = "#define __GNUC__ 12\n#define __GNUC_MINOR__ 2\n#define __GNUC_PATCHLEVEL__ 0\n"
# clang claims to be GCC 4.2.1 besides being itself.
CLANG = (
    "#define __GNUC__ 4\n#define __GNUC_MINOR__ 2\n#define __GNUC_PATCHLEVEL__ 1\n"
    "#define __clang_major__ 17\n#define __clang_minor__ 0\n#define __clang_patchlevel__ 1\n"
)


@pytest.mark.parametrize(
    ("macros", "name", "version"), [(GCC, "gcc", "12.2.0"), (CLANG, "clang", "17.0.1")]
)
def test_compilers_are_known_by_their_macros(macros: str, name: str, version: str) -> None:
    expected = Compiler(path="/c++", name=name, version=version)
    assert device.parse_compiler("/c++", macros) == expected


@pytest.mark.parametrize("command", ["/bin/true", "/bin/false", "/bin/ls"])
def test_a_program_without_macros_is_not_a_compiler(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert device.detect_compiler(command) is None


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_preferred_compiler_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.detect_compiler(None) is None
    usual = script(tmp_path / "clang++", f"echo '{CLANG}'")
    mine = script(tmp_path / "my-c++", f"echo '{GCC}'")
    broken = script(tmp_path / "g++", "exit 1")
    found = device.detect_compiler(str(mine))
    assert found == Compiler(path=str(mine), name="gcc", version="12.2.0")
    for preferred in (None, "", "absent", "ccache g++", str(broken)):
        found = device.detect_compiler(preferred)
        assert found == Compiler(path=str(usual), name="clang", version="17.0.1")


@pytest.mark.parametrize(
    ("versions", "variables", "what", "hint"),
    [
        ((None, None), {}, "built without GPU support", "for CUDA or ROCm"),
        (("13.0", None), {}, "torch sees no GPU", "`nvidia-smi`"),
        ((None, "6.4"), {}, "torch sees no GPU", "`rocm-smi`"),
        (("13.0", None), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is ''", "unset it"),
        ((None, "6.4"), {"HIP_VISIBLE_DEVICES": "9"}, "HIP_VISIBLE_DEVICES is '9'", "unset it"),
    ],
)
def test_a_gpu_that_is_not_there_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[str | None, str | None],
    variables: dict[str, str],
    what: str,
    hint: str,
) -> None:
    for name in device._VISIBLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", versions[0])
    monkeypatch.setattr(torch.version, "hip", versions[1])
    with pytest.raises(IngotError) as raised:
        device.resolve("cuda")
    assert what in raised.value.message
    assert hint in raised.value.hint


def test_auto_without_an_accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert device.resolve() == torch.device("cpu")
    assert device.resolve("cpu") == device.resolve(torch.device("cpu")) == torch.device("cpu")


def test_auto_with_an_accelerator_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.resolve() == device.resolve("cuda") == torch.device("cuda:1")
    assert device.resolve("cuda:0") == torch.device("cuda:0")
    with pytest.raises(IngotError, match=r"cuda:2: index out of range, torch sees 2") as raised:
        device.resolve("cuda:2")
    assert raised.value.hint == "choose cuda:0 to cuda:1"


@pytest.mark.parametrize("name", ["gpu", "meta", "", "cuda:", "cuda:x", "cpu:-1", "cuda:0:0"])
def test_an_unknown_device_is_an_error_that_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(UnknownName) as raised:
        device.resolve(name)
    assert "auto, cpu, cuda" in raised.value.hint


def test_an_unavailable_accelerator_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(IngotError, match="device xpu: not available to torch") as raised:
        device.resolve("xpu")
    assert "build of torch for xpu" in raised.value.hint


def test_a_privateuse1_backend_is_a_device_like_any_other() -> None:
    code = """if True:
        from ingot.core import device
        from tests import fake_device

        assert device.resolve("fake") == device.resolve("fake:0") == fake_device.DEVICE
        assert device.resolve() == fake_device.DEVICE
    """
    subprocess.run([sys.executable, "-c", code], check=True)
