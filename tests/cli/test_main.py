from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ingot as package
from ingot.cli import SUMMARIES
from tests.cli.conftest import Run


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_fits_a_screen_and_lists_every_verb(cli: Run, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 80
    for verb, summary in SUMMARIES.items():
        assert any(verb in line and summary in line for line in lines)


def test_python_m_runs_the_same_command() -> None:
    command = [sys.executable, "-m", "ingot", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("ingot ")


def test_sigterm_cleans_up() -> None:
    code = """
import tempfile, time
from pathlib import Path
from ingot import cli

def wait():
    with tempfile.TemporaryDirectory() as directory:
        print(directory, flush=True)
        time.sleep(60)

cli.load_command = lambda verb: wait
cli.main(["wait"])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        directory = Path(process.stdout.readline().strip())
        assert directory.is_dir()
        process.terminate()
        assert process.wait(timeout=30) == 143
    assert not directory.exists()


def test_version(cli: Run) -> None:
    assert cli("--version").stdout == f"ingot {package.__version__}\n"


@pytest.mark.parametrize("verb", SUMMARIES)
def test_help_of_every_verb_has_an_example(cli: Run, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.returncode == 0
    assert f"`ingot {verb}" in result.stdout


def test_wrong_verb_suggests_the_right_one(cli: Run) -> None:
    result = cli("docter")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: unknown verb 'docter'",
        f"hint: did you mean 'doctor'? valid: {', '.join(sorted(SUMMARIES))}",
    ]


@pytest.mark.parametrize("verb", SUMMARIES)
def test_wrong_option_suggests_the_right_one(cli: Run, verb: str) -> None:
    subject = {
        "bench": ("ops",),
        "chat": ("directory",),
        "compare": ("directory", "--with", "other"),
        "tokenize": ("from", "to"),
        "eval": ("task", "directory"),
        "explain": ("directory",),
        "forecast": ("run",),
        "generate": ("directory", "prompt"),
        "import": ("from", "to"),
        "info": ("directory",),
        "keys": ("create", "alice"),
        "merge": ("adapter", "to"),
        "compress": ("directory", "to"),
        "plan": (
            *("model", "--gpu", "h100", "--gpus", "8"),
            *("--seq-len", "1", "--global-batch-size", "8"),
        ),
        "profile": ("recipe",),
        "pull": ("org/name",),
        "serve": ("directory",),
        "train": ("recipe",),
        "verify": ("directory",),
    }.get(verb, ())
    near = {"chat": ("--sede", "--seed"), "serve": ("--prot", "--port")}
    near |= {"explain": ("--lenght", "--length"), "profile": ("--stesp", "--steps")}
    near |= {"keys": ("--hlep", "--help")}  # which has no other option
    wrong, right = near.get(verb, ("--jsno", "--json"))
    result = cli(verb, *subject, wrong)
    assert result.returncode == 2
    assert right in result.stderr


def test_reader_that_exits_early_causes_no_traceback() -> None:
    command = Path(sys.executable).parent / "ingot"
    piped = ["bash", "-c", f"{command} ops --json | head -1"]
    result = subprocess.run(piped, capture_output=True, text=True)
    assert result.stdout == "[\n"
    assert result.stderr == ""
