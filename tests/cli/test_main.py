from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ingot as package
from ingot.cli import SUMMARIES

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_fits_a_screen_and_names_every_verb(ingot: Run, arguments: tuple[str, ...]) -> None:
    result = ingot(*arguments)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for verb, summary in SUMMARIES.items():
        assert any(verb in line and summary in line for line in lines)


def test_python_m_is_the_same() -> None:
    command = [sys.executable, "-m", "ingot", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("ingot ")


def test_version(ingot: Run) -> None:
    assert ingot("--version").stdout == f"ingot {package.__version__}\n"


@pytest.mark.parametrize("verb", SUMMARIES)
def test_the_help_of_every_verb_has_an_example(ingot: Run, verb: str) -> None:
    result = ingot(verb, "--help")
    assert result.returncode == 0
    assert f"`ingot {verb}" in result.stdout


def test_a_wrong_verb_suggests_the_right_one(ingot: Run) -> None:
    result = ingot("docter")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: unknown verb 'docter'",
        f"hint: did you mean 'doctor'? valid: {', '.join(sorted(SUMMARIES))}",
    ]


@pytest.mark.parametrize("verb", SUMMARIES)
def test_a_wrong_option_suggests_the_right_one(ingot: Run, verb: str) -> None:
    subject = {
        "bench": ("ops",),
        "chat": ("directory",),
        "tokenize": ("from", "to"),
        "generate": ("directory", "prompt"),
        "import": ("from", "to"),
        "info": ("directory",),
        "serve": ("directory",),
        "train": ("recipe",),
        "verify": ("directory",),
    }.get(verb, ())
    near = {"chat": ("--sede", "--seed"), "serve": ("--prot", "--port")}
    wrong, right = near.get(verb, ("--jsno", "--json"))
    result = ingot(verb, *subject, wrong)
    assert result.returncode == 2
    assert right in result.stderr


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = Path(sys.executable).parent / "ingot"
    piped = ["bash", "-c", f"{command} ops --json | head -1"]
    result = subprocess.run(piped, capture_output=True, text=True)
    assert result.stdout == "[\n"
    assert result.stderr == ""
