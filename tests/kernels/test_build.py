"""Building on first use, in separate processes with separate caches.

The compiler is a script that notes each library it is asked for in the cache, and then runs g++. It
keeps what g++ has written and copies it if the same command is run again: compiling the smallest
family takes several seconds, and most tests are about what happens before and after.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from ingot.core.device import Compiler, detect
from ingot.kernels.cpu import build
from tests import fork

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

WARNING = "falling back to PyTorch's kernels, results are not batch-invariant: "
USE = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch
from ingot import ops
x = torch.linspace(-3, 3, 50)
y = ops.silu(x)
assert y.shape == x.shape
assert torch.allclose(y, x * x.sigmoid(), rtol=1.3e-6, atol=1e-5)  # assert_close imports sympy
ops.gelu(x)
print(ops.silu.select(x).name)
"""

Environment = dict[str, str]
T = TypeVar("T")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def noting(compiler: str, then: str = "") -> str:
    note = 'case " $* " in *" -o "*) echo built >> "$XDG_CACHE_HOME/calls";; esac'
    return f'{note}\n{then}\nexec {compiler} "$@"'


def keeping(compiler: str) -> str:
    """Return a script that compiles; the last argument is the output, as `build` passes it."""
    return f"""
kept="$(dirname "$0")/$(printf '%s' "$*" | sed 's/ -o [^ ]*$//' | sha256sum | cut -c1-16)"
for output; do :; done
[ -e "$kept" ] && exec cp "$kept" "$output"
{compiler} "$@" || exit
case " $* " in *" -o "*) cp "$output" "$kept.$$" && mv "$kept.$$" "$kept";; esac"""


def environment(cache: Path, **variables: str) -> Environment:
    known = {**os.environ, "XDG_CACHE_HOME": str(cache), "INGOT_ISA": "", **variables}
    return {name: value for name, value in known.items() if value}


def run(code: str, environment: Environment) -> subprocess.CompletedProcess[str]:
    done = fork.run(["-c", code], env=environment)
    assert done.returncode == 0, done.stderr
    return done


def calls(cache: Path) -> int:
    """How many libraries the compiler was asked for."""
    notes = cache / "calls"
    return len(notes.read_text().split()) if notes.exists() else 0


def libraries(cache: Path) -> list[Path]:
    return list((cache / "ingot" / "kernels").glob("*.so"))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = detect().compiler
    assert found
    folder = tmp_path_factory.mktemp("bin")
    keep = script(folder / "keep", keeping(found.path))
    return script(folder / "cxx", noting(keep))


@pytest.fixture(scope="module")
def first_use(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache after a first use."""
    cache = tmp_path_factory.mktemp("cache")
    done = run(USE, environment(cache, CXX=compiler))
    assert (done.stdout, done.stderr) == ("cpu\n", "")
    return cache


@pytest.fixture
def cache(first_use: Path, tmp_path: Path) -> Path:
    """A copy of that cache, with no calls of the compiler noted yet."""
    return shutil.copytree(first_use, tmp_path / "cache", ignore=shutil.ignore_patterns("calls"))


def test_the_first_use_builds_one_library_and_leaves_nothing_else(first_use: Path) -> None:
    (library,) = libraries(first_use)
    names = {path.name for path in library.parent.iterdir()}
    assert names - {f"{library.name}.lock"} == {library.name, f"{library.stem}.sha256"}
    assert calls(first_use) == 1


def test_the_second_use_builds_nothing(cache: Path, compiler: str) -> None:
    assert run(USE, environment(cache, CXX=compiler)).stdout == "cpu\n"
    assert calls(cache) == 0


def test_processes_that_start_at_once_build_once(tmp_path: Path, compiler: str) -> None:
    """Four forks wait at a pipe until the last of them exists."""
    code = f"""
import os, sys
gate, opener = os.pipe()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os.close(opener)
        os.read(gate, 1)
        exec({USE!r})
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
os.close(opener)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""
    done = run(code, environment(tmp_path, CXX=compiler, OMP_NUM_THREADS="1"))
    assert (done.stdout, done.stderr) == ("cpu\n" * 4, "")
    assert calls(tmp_path) == 1


def test_threads_that_call_at_once_build_once(tmp_path: Path, compiler: str) -> None:
    code = """
import threading, torch
from ingot import ops
x, barrier, results = torch.linspace(-3, 3, 50), threading.Barrier(8), []
def call():
    barrier.wait()
    results.append(ops.silu(x))
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8 and all(torch.equal(r, results[0]) for r in results)
"""
    run(code, environment(tmp_path, CXX=compiler))
    assert calls(tmp_path) == 1


def test_an_op_may_be_called_while_its_library_is_being_loaded(cache: Path, compiler: str) -> None:
    """Its kernels are registered a moment before they can see whether a provider is preferred."""
    code = """
import ctypes, torch
import ingot.kernels.cpu.activation
from ingot import ops
from ingot.kernels.cpu import build
ctypes.CDLL(str(build.build(["activation"])[0].path))
print(float(ops.silu(torch.zeros(1))))
"""
    assert run(code, environment(cache, CXX=compiler)).stdout == "0.0\n"


def test_a_forked_process_computes_too(cache: Path, compiler: str) -> None:
    code = """
import os, torch
from ingot import ops
torch.set_num_threads(1)
x = torch.linspace(-3, 3, 50)
def in_child(expected):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.silu(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
in_child(ops.silu(x))
"""
    run(code, environment(cache, CXX=compiler))
    # And one that is forked before the first use.
    run(code.replace("in_child(ops.silu(x))", "import ingot.kernels.cpu.activation\n"
        "if os.fork() == 0:\n    ops.silu(x)\n    os._exit(0)\n"
        "assert os.wait()[1] == 0"), environment(cache, CXX=compiler))  # fmt: skip
    assert calls(cache) == 0


def truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def lose_checksum(library: Path) -> None:
    library.with_suffix(".sha256").unlink()


def garble_checksum(library: Path) -> None:
    library.with_suffix(".sha256").write_bytes(b"\xff" * 64)


@pytest.mark.parametrize("damage", [truncate, flip, lose_checksum, garble_checksum])
def test_what_is_damaged_is_built_again(
    cache: Path, compiler: str, damage: Callable[[Path], None]
) -> None:
    (library,) = libraries(cache)
    intact = library.read_bytes()
    damage(library)
    assert run(USE, environment(cache, CXX=compiler)).stdout == "cpu\n"
    assert calls(cache) == 1
    assert library.read_bytes() == intact


def test_leftovers_do_no_harm(cache: Path, compiler: str) -> None:
    (library,) = libraries(cache)
    library.unlink()
    Path(f"{library}.lock").write_text("stale")
    library.with_suffix(".1.tmp").write_text("half a library")
    assert run(USE, environment(cache, CXX=compiler)).stdout == "cpu\n"
    assert calls(cache) == 1


def test_a_build_that_was_killed_does_no_harm(
    tmp_path: Path, compiler: str, first_use: Path
) -> None:
    """The compiler waits in the first process, which is killed with the lock in its hands."""
    waiting = script(tmp_path / "cxx", noting(compiler, 'case " $* " in *" -o "*) sleep 60; esac'))
    process = subprocess.Popen(
        [sys.executable, "-c", USE], env=environment(tmp_path, CXX=waiting), start_new_session=True
    )
    while calls(tmp_path) == 0:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    script(tmp_path / "cxx", noting(compiler))
    assert run(USE, environment(tmp_path, CXX=waiting)).stdout == "cpu\n"


def test_a_cache_that_is_complete_needs_no_lock(cache: Path, compiler: str) -> None:
    """As on a file system that is mounted read-only."""
    (library,) = libraries(cache)
    lock = Path(f"{library}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert run(USE, environment(cache, CXX=compiler)).stdout == "cpu\n"


def test_a_month_unused_is_forgotten_at_the_next_build(cache: Path, compiler: str) -> None:
    (library,) = libraries(cache)
    old, recent = library.with_name("old.so"), library.with_name("recent.so")
    now = time.time()
    for path, days in ((old, 31), (recent, 29), (library, 31)):
        path.touch()
        os.utime(path, (now, now - days * 86400))
    run(USE, environment(cache, CXX=compiler))  # which uses the library
    assert library.stat().st_mtime >= now - 1
    assert old.exists()
    another = script(cache / "cxx", f'exec {compiler} "$@"')
    run(USE, environment(cache, CXX=another))
    assert calls(cache) == 1
    assert recent.exists()
    assert library.exists()
    assert not old.exists()


def in_words(done: subprocess.CompletedProcess[str]) -> str:
    """The one warning, after all ops have been computed by ATen."""
    assert done.stdout == "aten\n"
    assert done.stderr.count(WARNING) == 1
    assert done.stderr.startswith(WARNING)
    return done.stderr.removeprefix(WARNING)


def test_without_a_compiler_pytorch_computes(tmp_path: Path) -> None:
    done = run(USE, environment(tmp_path, CXX="", PATH=str(tmp_path)))
    assert in_words(done) == ("no C++ compiler\n  hint: install g++ 12 or newer, or set CXX\n")


def test_one_warning_is_for_all_families(tmp_path: Path) -> None:
    code = USE.replace(
        "ops.gelu(x)",
        """
from ingot.kernels.cpu import build
assert build.library("another") is build.library("third") is None""",
    )
    in_words(run(code, environment(tmp_path, CXX="", PATH=str(tmp_path))))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, compiler: str) -> None:
    failing = script(
        tmp_path / "cxx",
        'case " $* " in *" -o "*) echo "In file included"; echo "x.h:1: error: no such luck";'
        f' echo "x.h:2: error: nor there"; exit 1;; esac >&2\nexec {compiler} "$@"',
    )
    words = in_words(run(USE, environment(tmp_path, CXX=failing)))
    assert words.startswith(
        f"{failing} cannot compile activation.cpp: x.h:1: error: no such luck\n"
    )
    assert "hint: set CXX to another compiler" in words
    assert libraries(tmp_path) == []


def test_flags_of_ones_own_that_fail_are_quoted(tmp_path: Path, compiler: str) -> None:
    words = in_words(
        run(USE, environment(tmp_path, CXX=compiler, INGOT_CXXFLAGS="-include absent.h"))
    )
    assert "absent.h: No such file or directory" in words


def test_an_unwritable_cache_is_explained(tmp_path: Path, compiler: str) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    words = in_words(run(USE, environment(in_the_way, CXX=compiler)))
    assert words.startswith(f"cannot write {in_the_way}/ingot/kernels: Not a directory\n")


def test_nothing_is_loaded_from_where_others_can_write(cache: Path, compiler: str) -> None:
    (library,) = libraries(cache)
    library.parent.chmod(0o777)
    words = in_words(run(USE, environment(cache, CXX=compiler)))
    assert words.startswith(f"{library.parent}: other users can write to it")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=755", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root mounts a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_explained(small_disk: Path, compiler: str) -> None:
    words = in_words(run(USE, environment(small_disk, CXX=compiler)))
    assert "No space left on device" in words
    assert "hint: free space" in words
    assert not [p for p in (small_disk / "ingot/kernels").iterdir() if p.suffix != ".lock"]


def test_a_tier_that_cannot_be_is_an_error_at_the_first_call(tmp_path: Path) -> None:
    code = "import torch\nfrom ingot import ops\nops.silu(torch.zeros(1))"
    done = fork.run(["-c", code], env=environment(tmp_path, INGOT_ISA="nonsense"))
    assert done.returncode == 1
    assert "unknown INGOT_ISA 'nonsense'" in done.stderr


def test_the_key_changes_with_all_that_goes_into_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(build.HERE, tmp_path / "cpu")
    monkeypatch.setattr(build, "HERE", sources)
    gcc = Compiler(path="/c++", name="gcc", version="12.2.0")

    def key(tier: str = "avx2", compiler: Compiler = gcc, torch: str = "2.13.0") -> str:
        return build._key("activation", build._command(compiler, tier), compiler, torch)

    same = key()
    assert key() == same
    keys = [same, *(key(tier) for tier in build.TIER_FLAGS if tier != "avx2")]
    keys.append(key(compiler=Compiler(path="/other", name="gcc", version="12.2.0")))
    keys.append(key(compiler=Compiler(path="/c++", name="gcc", version="13.1.0")))
    keys.append(key(torch="2.14.0"))
    monkeypatch.setenv("INGOT_CXXFLAGS", "-O1")
    keys.append(key())
    monkeypatch.delenv("INGOT_CXXFLAGS")
    for name in ("activation.cpp", "vector.h", "tensor.h"):
        with (sources / name).open("a") as source:
            source.write("\n")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    for name in ("build.py", "attention_common.h"):  # which the family does not include
        with (sources / name).open("a") as source:
            source.write("\n")
    assert key() == keys[-1]


@pytest.mark.parametrize(
    "tier",
    [
        pytest.param(tier, marks=() if tier == "amx" else pytest.mark.slow)
        for tier in build.TIER_FLAGS
    ],
)
def test_all_families_compile_for_tiers_of_other_machines(tier: str) -> None:
    """AMX is the tier with the most code of its own, and few machines have it."""
    gcc = detect().compiler
    assert gcc is not None
    command = build._command(gcc, tier)
    flags = [flag for flag in command if not flag.startswith(("-shared", "-Wl", "-L", "-l"))]

    def check(family: str) -> str:
        source = build.HERE / f"{family}.cpp"
        done = subprocess.run([*flags, "-fsyntax-only", str(source)], capture_output=True)
        return done.stderr.decode() if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [error for error in pool.map(check, build.FAMILIES) if error] == []


def test_the_declarations_of_the_abi_are_those_of_torch() -> None:
    """C functions cannot be overloaded, so the compiler refuses a declaration that differs."""
    found = detect().compiler
    assert found
    headers = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
    includes = [f"#include <{header}>" for header in headers]
    ours = (build.HERE / "torch_shim.h").read_text()
    command = [*build._command(found, "portable"), "-fsyntax-only", "-x", "c++", "-"]

    def compiles(declarations: str) -> bool:
        source = "\n".join((*includes, declarations))
        return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0

    assert compiles(ours)
    assert not compiles(ours.replace("int32_t dtype, int32_t device_type", "int32_t dtype"))
    assert not compiles(ours.replace("size_t aoti_torch_dtype", "int32_t aoti_torch_dtype"))


def test_a_library_that_is_there_loads_quickly(cache: Path, compiler: str) -> None:
    """Typically 5 ms; in one of three, as machines are noisy."""
    code = """
import time, torch
from ingot import ops
from ingot.kernels.cpu import build
import ingot.kernels.cpu.activation
build.detect()
start = time.perf_counter()
assert build.library("activation")
print(time.perf_counter() - start)
"""
    known = environment(cache, CXX=compiler)
    assert any(float(run(code, known).stdout) < 0.1 for _ in range(3))
    assert calls(cache) == 0


def compile_seconds(function: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU time of the processes that a function starts, and its result."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = function()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(after[:2]) - sum(before[:2]), result


@pytest.mark.slow
def test_compiling_all_families_takes_at_most_11_times_that_of_std_regex(
    tmp_path: Path, compiler: str
) -> None:
    """In CPU time, relative to another file: the speed of machines differs by 2x within a day.

    When this was written, the ratio was 8.8, and all families took 44 s on two cores.
    """
    source = tmp_path / "regex.cpp"
    source.write_text(
        "#include <regex>\n#include <string>\n"
        "bool f(const std::string& s) { return std::regex_match(s, std::regex(s)); }\n"
        "bool g(const std::wstring& s) { return std::regex_match(s, std::wregex(s)); }\n"
    )
    command = [compiler, "-std=c++20", "-O3", "-c", str(source), "-o", str(tmp_path / "regex.o")]
    file, _ = compile_seconds(lambda: subprocess.run(command, check=True))
    code = "from ingot.kernels.cpu.build import build, FAMILIES; build(); print(len(FAMILIES))"
    families, done = compile_seconds(lambda: run(code, environment(tmp_path, CXX=compiler)))
    assert families < 11 * file
    assert len(libraries(tmp_path)) == int(done.stdout)
    assert calls(tmp_path) == int(done.stdout) + 1  # and the precompiled header
    assert not list((tmp_path / "ingot" / "kernels").glob("pch-*"))
