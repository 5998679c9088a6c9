"""The policies of the repository, in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ingot import ops
from ingot.cli import SUMMARIES
from tools import prose, structure, syntax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ingot"
FILES = sorted(PACKAGE.rglob("*.py"))
FAMILIES = {op.family for op in ops.registry().values()}


@pytest.fixture(autouse=True, scope="module")
def _free_trees() -> Iterator[None]:
    yield
    syntax.forget()


def modules_after(statement: str) -> set[str]:
    """What a new process has imported after the statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def basenames(folder: Path) -> set[str]:
    names = {path.name.partition(".")[0] for path in folder.iterdir() if path.is_file()}
    # `import_` is how Python spells a name that is a word of its own.
    return {name.removesuffix("_") for name in names - {"__init__"}}


@pytest.mark.parametrize("light", ["ingot", "ingot.core.device", "ingot.cli", "ingot.data"])
def test_importing_what_is_light_imports_nothing_heavy(light: str) -> None:
    heavy = {"torch", "triton", "transformers", "numpy"}
    assert modules_after(f"import {light}").isdisjoint(heavy)


def test_every_module_of_core_imports_without_torch() -> None:
    names = ", ".join(f"ingot.core.{name}" for name in sorted(basenames(PACKAGE / "core")))
    assert "torch" not in modules_after(f"import {names}")


def test_the_scheduler_and_its_simulator_import_without_torch() -> None:
    engine = ", ".join(f"ingot.serving.engine.{n}" for n in ("request", "blocks", "scheduler"))
    fleet = ", ".join(f"ingot.serving.fleet.{n}" for n in ("router", "autoscaler", "memory"))
    names = f"{engine}, {fleet}, ingot.serving.simulate, ingot.cli.simulate"
    assert modules_after(f"import {names}").isdisjoint({"torch", "numpy"})


def test_importing_the_ops_imports_no_kernels_and_touches_no_device() -> None:
    statement = (
        "import ingot; ingot.ops\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()"
    )
    loaded = modules_after(statement)
    assert loaded.isdisjoint({"triton", "transformers"})
    assert not any(name.startswith("ingot.kernels") for name in loaded)


def test_importing_ingot_and_its_ops_is_quick() -> None:
    """Beyond torch. Typically 80 ms of CPU time; in one of three, as machines are noisy."""

    def seconds() -> float:
        code = (
            "import time, torch; start = time.process_time(); import ingot, ingot.ops; "
            "print(time.process_time() - start)"
        )
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert any(seconds() < 0.3 for _ in range(3))


def test_every_kernel_file_belongs_to_a_family_of_ops() -> None:
    providers = [
        path for path in (PACKAGE / "kernels").iterdir() if (path / "__init__.py").exists()
    ]
    assert providers
    headers = {"tensor", "vector", "amx", "matmul", "transpose", "threads", "scratch"}
    headers |= {"registration", "logsum", "gradient", "epilogue", "quantized_tensors"}
    headers |= {"torch_abi", "torch_shim", "kv_cache", "gru", "philox", "tunables"}
    headers |= {f"matmul_{part}" for part in ("block", "dot", "lanes", "amx")}
    headers |= {f"attention_{part}" for part in ("common", "kernel", "vector", "backward")}
    headers |= {f"attention_{part}" for part in ("amx", "amx_decode", "amx_prefill")}
    headers |= {f"attention_vector_{part}" for part in ("decode", "prefill")}
    builders = {"build", "replay", "tuning"}
    # How Triton kernels are declared and launched, and what they share.
    shared = {"kernel", "launch", "provider", "target", "autotune", "config_store", "defaults"}
    shared |= {"packed", "reduce", "attention_tiles", "attention_backward"}
    # How they are compiled and checked without a GPU.
    checks = {"compiler", "disassembly", "codegen_checks", "interpreter", "report", "ceiling"}
    checks |= {"tutorial_kernels"}
    for provider in providers:
        assert basenames(provider) - headers - builders - shared - checks <= FAMILIES, provider


def test_every_family_has_its_file_and_its_tests() -> None:
    assert basenames(PACKAGE / "ops") >= FAMILIES
    assert {f"test_{family}" for family in FAMILIES} <= basenames(ROOT / "tests/ops")


# Kernels themselves are tested through the ops they serve.
FOLDERS = {path.parent.relative_to(PACKAGE) for path in FILES} - {Path()}
FOLDERS = sorted(folder for folder in FOLDERS if folder.parts[0] != "kernels")


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_tests_mirror_the_source(folder: Path) -> None:
    tested = {name.removeprefix("test_") for name in basenames(ROOT / "tests" / folder)}
    assert basenames(PACKAGE / folder) <= tested


def test_every_verb_has_its_file_and_its_summary() -> None:
    """Or several: `bench_serve` belongs to `bench`. `tables` is shared by all."""
    verbs = {name.partition("_")[0] for name in basenames(PACKAGE / "cli")} - {"tables"}
    assert verbs == set(SUMMARIES)


def public_definitions(tree: ast.Module) -> list[ast.AST]:
    """Functions, classes and methods whose whole path has no underscore."""
    found: list[ast.AST] = []
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
                continue  # the implementation has the docstring
            found.append(node)
            queue += node.body if isinstance(node, ast.ClassDef) else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = syntax.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "the module"
    for node in public_definitions(tree):
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        assert ast.get_docstring(node), f"{node.name} in line {node.lineno}"


def test_no_device_is_hard_coded() -> None:
    allowed = {PACKAGE / "core/device.py", *(PACKAGE / "kernels").rglob("*.py")}
    for path in set(FILES) - allowed:
        for node in syntax.nodes(path.read_text()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("cuda"), f"{path} line {node.lineno}"


def test_no_folder_collects_leftovers() -> None:
    leftovers = {"utils", "util", "common", "helpers", "misc", "experimental"}
    assert leftovers.isdisjoint(path.stem for path in PACKAGE.rglob("*"))


# Words: `tools/prose.py` has the list, `docs/glossary.md` the reasons.

TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
CPP = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".h", ".cpp"))
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = [path for path in DOCS if path.name != "glossary.md"]

CEILINGS: dict[str, tuple[int, Callable[[str], Iterator[prose.Passage]], Iterable[Path]]] = {
    "documentation": (0, prose.markdown, DOCS),
    "strings of the command line": (0, prose.strings, (PACKAGE / "cli").rglob("*.py")),
    "errors, hints and logs": (0, prose.messages, FILES),
    "strings in C++": (0, prose.cpp_strings, CPP),
    "docstrings": (0, prose.docstrings, FILES),
    "comments": (0, prose.comments, FILES),
    "comments in C++": (0, prose.cpp_comments, CPP),
    "names": (0, prose.names, FILES),
    "docstrings of tests": (0, prose.docstrings, TESTS),
    "comments in tests": (0, prose.comments, TESTS),
    "names of tests": (0, prose.names, TESTS),
    "docstrings of tools": (0, prose.docstrings, TOOLS),
}
"""The most words of the list that a kind of text may hold. These numbers only ever fall."""


@pytest.mark.parametrize("kind", CEILINGS)
def test_words_outside_the_vocabulary_do_not_come_back(kind: str) -> None:
    ceiling, select, paths = CEILINGS[kind]
    hits = [
        hit
        for path in sorted(paths)
        for hit in prose.find_words(path.relative_to(ROOT), select(path.read_text()))
    ]
    listing = "\n".join(map(str, hits))
    assert len(hits) <= ceiling, f"{len(hits)} in {kind}, more than {ceiling}:\n{listing}"


# Structure: `tools/structure.py`.

MAX_DUPLICATE_CLASSES, MAX_LONG_FUNCTIONS, MAX_LONG_FILES = 0, 0, 1
"""These numbers only ever fall."""


def test_class_names_are_unique() -> None:
    sources = {path.relative_to(ROOT): path.read_text() for path in FILES}
    found = structure.duplicate_classes(sources)
    assert len(found) <= MAX_DUPLICATE_CLASSES, "\n".join(found)


def test_functions_are_short() -> None:
    found = [
        line
        for path in FILES
        for line in structure.long_functions(path.relative_to(ROOT), path.read_text())
    ]
    assert len(found) <= MAX_LONG_FUNCTIONS, "\n".join(found)


def test_files_are_short_or_say_why_not() -> None:
    found = structure.long_files([*FILES, *CPP, *TESTS, *TOOLS])
    assert len(found) <= MAX_LONG_FILES, "\n".join(found)
