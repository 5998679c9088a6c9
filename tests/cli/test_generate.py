from __future__ import annotations

import io
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot as package
from ingot.cli.generate import GenerationResult, SamplingOptions, generate
from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.serving.engine.speculate import NgramProposer, QuantizedProposer
from tests import adapters

COMMAND = str(Path(sys.executable).parent / "ingot")
HOT = SamplingOptions(temperature=2.0, seed=3)


def test_the_text_goes_to_stdout_and_the_stats_to_stderr(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(str(tiny), "Hello", sampling=HOT, max_tokens=5)
    out, err = capsys.readouterr()
    expected = package.LLM(tiny).generate("Hello", HOT.params(), max_tokens=5).text
    assert out == f"Hello{expected}\n"
    stats = (
        r"5 tokens, the first after \d\.\d{3} s, then [\d.]+ tokens/s; stopped at --max-tokens\n"
    )
    assert re.fullmatch(stats, err)


def test_json_is_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(str(tiny), "Hello", sampling=HOT, max_tokens=3, json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["text"] == package.LLM(tiny).generate("Hello", HOT.params(), max_tokens=3).text
    assert (found["prompt_tokens"], found["tokens"], found["finish_reason"]) == (5, 3, "length")
    assert 0 < found["ttft_seconds"] <= found["seconds"]
    assert err == ""


def test_speculation_does_not_change_the_text(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[type] = []
    for proposer in (NgramProposer, QuantizedProposer):

        def propose(self: Any, *args: Any, original: Any = proposer.propose) -> Any:
            used.append(type(self))
            return original(self, *args)

        monkeypatch.setattr(proposer, "propose", propose)
    texts: set[str] = set()
    for kind in (None, "ngram", "int4"):
        generate(str(tiny), "ab ab ab", max_tokens=24, speculate=kind, json=True)
        texts.add(json.loads(capsys.readouterr().out)["text"])
    assert len(texts) == 1
    assert set(used) == {NgramProposer, QuantizedProposer}


def test_an_adapter_changes_the_text(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapters.save(hf.load(tiny), tmp_path / "adapter", seed=1)
    texts: list[str] = []
    for path in (None, adapter):
        generate(str(tiny), "ab", max_tokens=8, adapter=path, json=True)
        texts.append(json.loads(capsys.readouterr().out)["text"])
    llm = package.LLM(tiny, adapters={"a": adapter})
    assert texts[0] == llm.generate("ab", max_tokens=8).text
    assert texts[1] == llm.generate("ab", max_tokens=8, adapter="a").text
    assert texts[0] != texts[1]


def test_a_full_context_is_reported(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = package.LLM(tiny).max_seq_len
    generate(str(tiny), "x" * (context - 2), max_tokens=99)
    stats = capsys.readouterr().err
    assert stats.startswith("2 tokens, ")
    assert " ".join(stats.split()).endswith("; the model's context is full")
    generate(str(tiny), "x" * (context - 2), max_tokens=99, json=True)
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"
    with pytest.raises(IngotError, match=f"expected 1 to {context - 1} tokens, got {context}"):
        generate(str(tiny), "x" * context)


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def cut(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def lie(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def absurd(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 10**12}))


def larger(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 500}))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (no_config, "has no config.json"),
        (no_tokenizer, "tokenizer.json not found"),
        (cut, "not safetensors"),
        (lie, "not safetensors"),
        (absurd, "dim is 1000000000000"),
        (larger, "tensors are not in"),
    ],
)
def test_a_damaged_directory_is_refused(
    tiny: Path, damage: Callable[[Path], None], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tiny)
    with pytest.raises(IngotError, match=error):
        generate(str(tiny), "Hello")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [("", 5, "give some text"), ("x" * 10**5, 5, "shorten the prompt"), ("x", 0, "max-tokens")],
)
def test_wrong_arguments_are_errors_before_anything_is_written(
    tiny: Path, prompt: str, max_tokens: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IngotError, match=error):
        generate(str(tiny), prompt, max_tokens=max_tokens)
    assert capsys.readouterr() == ("", "")


def test_a_path_without_a_model_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match=r"not found: .*nowhere\n.*name a directory"):
        generate(str(tmp_path / "nowhere"), "Hello")
    (file := tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(IngotError, match=rf"is a file.*\n.*ingot import {file}"):
        generate(str(file), "Hello")


class Terminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    generate(str(tiny), "a\x1b[2J\x9b2J\rb\tc\n\N{ZERO WIDTH JOINER}", max_tokens=1)
    assert terminal.getvalue().startswith("a?[2J?2J?b\tc\n\N{ZERO WIDTH JOINER}")


def test_an_encoding_that_lacks_a_character_does_not_stop_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    generate(str(tiny), "caf\xe9 \udcff", max_tokens=1)
    assert written.getvalue().startswith(b"caf? ?")


def test_stats_of_few_tokens() -> None:
    assert str(GenerationResult()) == "no tokens"
    assert (
        str(GenerationResult(tokens=1, ttft=0.25, seconds=0.25))
        == "1 token, the first after 0.250 s"
    )


def test_ctrl_c_leaves_with_what_was_written(smollm2: Path, environment: dict[str, str]) -> None:
    command = [COMMAND, "generate", str(smollm2), "Once upon a time", "--max-tokens", "5000"]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        head = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate()
    assert process.returncode == 130
    assert head == "Once upon a time, the city of Nova Haven"
    assert rest.endswith("\n")
    assert re.fullmatch(
        r"\d+ tokens, the first after [\d.]+ s, then [\d.]+ tokens/s; interrupted\n", err
    )


def test_a_reader_that_leaves_early_ends_it(smollm2: Path, environment: dict[str, str]) -> None:
    script = (
        f"{COMMAND} generate {smollm2} Hello --max-tokens 5000 | head -c 5; echo ${{PIPESTATUS}}"
    )
    command = ["bash", "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "Hello141\n"
    assert result.stderr == ""


LOADING = """
import json, sys, time
import ingot.cli.generate, ingot.workflows.llm, ingot.kernels.cpu
def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])
before, start = memory("VmRSS"), time.perf_counter()
model = ingot.LLM(sys.argv[1])
ids = model.tokenizer.encode("Once upon a time there was a model that was loaded")
next(model.stream(ids, max_tokens=16))
seconds = time.perf_counter() - start
peak = memory("VmHWM")  # not ru_maxrss, which begins with what the parent had
weights = sum(parameter.nbytes for parameter in model.decoder.parameters())
late = [name for name in ("sympy", "torch._dynamo", "transformers") if name in sys.modules]
print(json.dumps({"seconds": seconds, "ratio": (peak - before) / weights, "late": late}))
"""


def test_loading_takes_the_weights_once_and_no_compiler(
    smollm2: Path, environment: dict[str, str]
) -> None:
    """sympy and dynamo would take 3 s to import, where all of it takes half a second."""
    command = [sys.executable, "-c", LOADING, str(smollm2)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    print(found)  # noqa: T201
    assert found["late"] == []
    assert 1 <= found["ratio"] < 1.3


@pytest.mark.slow
def test_a_new_process_soon_has_its_first_token(smollm2: Path, environment: dict[str, str]) -> None:
    """From its start on; and what of it is not Python's import of torch, in the same run."""

    def first(*command: str) -> float:
        start = time.perf_counter()
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout
            process.stdout.read(1)
            seconds = time.perf_counter() - start
            process.stdout.read()
        return seconds

    generate = (COMMAND, "generate", str(smollm2), "Once upon a time", "--max-tokens", "2")
    torch = (sys.executable, "-c", "import torch; print(1)")
    first(*generate)  # builds what is not built, and has the files in the kernel's cache
    wholes, imports = zip(*((first(*generate), first(*torch)) for _ in range(7)), strict=True)
    whole, alone = statistics.median(wholes), statistics.median(imports)
    print(f"first token {whole:.2f} s after the start, `import torch` alone {alone:.2f} s")  # noqa: T201
    assert whole < 1.75 * alone  # measured 1.52; seconds move with the machine
