"""The command line: `ingot VERB`, one file per verb.

A verb is a function with typed parameters, or several of them by name (`ingot bench ops`); tyro
builds the options and the help from the signature and the docstring. Only the module of the called
verb is imported.
"""

from __future__ import annotations

import errno
import gc
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any, TypeAlias

import ingot
from ingot.core.errors import IngotError, UnknownName
from ingot.core.log import setup, stderr, stdout

# PyTorch's OpenMP threads spin for 9 ms before they sleep, on the cores that our own threads need
# next; 10000 iterations take 0.3 ms. libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

SUMMARIES = {
    "bench": "time ops, generation, serving and training; compare systems",
    "build": "compile the CPU kernels ahead of time",
    "chat": "chat with a model in the terminal",
    "compare": "compare with transformers, vLLM, a server or another copy",
    "compress": "quantize the weights of a model to 8 or 4 bits",
    "doctor": "show the machine, its measured peaks, and issues with hints",
    "eval": "evaluate a model: perplexity, exact match, pass@k, choices",
    "explain": "where a PyTorch model spends its time, and what to do",
    "forecast": "forecast the loss of a training run",
    "generate": "generate text from a prompt",
    "import": "import a GGUF file or a Hugging Face directory",
    "info": "describe a model: architecture, size, memory, lineage",
    "kernels": "compile the GPU kernels without a GPU; registers, spills",
    "keys": "create API keys for the server",
    "merge": "merge a LoRA adapter into its base model",
    "ops": "list the ops: providers, batch invariance, tolerance, cost",
    "plan": "rank the parallel layouts of a training run on a GPU cluster",
    "profile": "where a training run spends its time, and what would help",
    "pull": "download a model from the Hugging Face hub",
    "runs": "list and compare training runs",
    "serve": "serve a model with an OpenAI-compatible API",
    "simulate": "simulate a server under load: latencies, goodput, cache hits",
    "tokenize": "tokenize text to disk, for training",
    "train": "train from a recipe (resumable bit-for-bit)",
    "tune": "autotune the kernels on this GPU or CPU",
    "verify": "check that serving and training agree bitwise",
}
Command: TypeAlias = Callable[..., Any] | dict[str, Callable[..., Any]]
"""The function of a verb, or the functions of its subcommands by name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `ingot` with these arguments (default: those of the process); always exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Clean up as after Ctrl-C: processes of other systems, temporary directories.
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        status = _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe can be handled
        sys.exit(status)
    except IngotError as error:
        stderr().print(
            f"[bold red]error:[/] {escape_markup(error.message)}", highlight=False, soft_wrap=True
        )
        stderr().print(
            f"[bold]hint:[/] {escape_markup(error.hint)}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except BrokenPipeError:
        # `ingot ops | head`: the reader has exited. Nothing may be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        stderr().print("[bold red]error:[/] no space left on device")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _exit_on_sigterm(*_: object) -> None:
    sys.exit(143)


def _run(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("--help", "-h", "help"):
        _print_help()
    elif verb == "--version":
        stdout().print(f"ingot {ingot.__version__}", highlight=False)
    else:
        with _frozen_objects():
            function = load_command(verb)
            setup()
            import tyro

        # tyro handles --help and invalid options, and suggests the nearest option.
        if callable(function):
            tyro.cli(function, args=rest, prog=f"ingot {verb}")
        else:
            tyro.extras.subcommand_cli_from_dict(function, args=rest, prog=f"ingot {verb}")
    return 0


def load_command(verb: str) -> Command:
    """Import the function of a verb from the file of its name.

    >>> load_command("ops").__name__
    'ops'
    """
    if verb not in SUMMARIES:
        raise UnknownName("verb", verb, SUMMARIES)
    name = f"{verb}_" if iskeyword(verb) else verb
    return pkgutil.resolve_name(f"ingot.cli.{name}:{name}")


@contextmanager
def _frozen_objects() -> Generator[None]:
    """Exclude the objects created here (modules, classes) from garbage collection, since they are
    never freed: importing torch takes 7 % less time, and generating a token 1 % less."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _print_help() -> None:
    from ingot.cli.tables import new_grid

    verbs = new_grid((f"  {verb}", summary) for verb, summary in SUMMARIES.items())
    stdout().print(verbs)  # one line each: they fit a screen of 24 lines


def escape_markup(text: str) -> str:
    """Escape rich's markup and replace control characters, e.g. in names of files and models.

    >>> escape_markup("[bold]name\\x1b[2J")
    '\\\\[bold]name?[2J'
    """
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))
