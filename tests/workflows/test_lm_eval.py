"""The adapter for lm-eval: the same requests as `ingot.evaluate` give the same digits.

`python -m ingot.workflows.lm_eval` itself is run only where lm-eval is installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ingot
from ingot.core.errors import ConfigError, IngotError
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.workflows import lm_eval
from ingot.workflows.lm_eval import IngotLM
from tests import models

HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer begins every text with BOS."""
    path = models.small(tmp_path_factory.mktemp("model") / "small", max_seq_len=128)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    token = {"id": "!", "ids": [tokenizer["model"]["vocab"]["!"]], "tokens": ["!"]}
    begin, text = (
        {"SpecialToken": {"id": "!", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"!": token},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "!"}))
    return path


@pytest.fixture(scope="module")
def lm(directory: Path) -> IngotLM:
    return IngotLM(str(directory))


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


def evaluate(directory: Path, folder: Path, rows: list[Any], **settings: Any) -> list[Any]:
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = ingot.evaluate(path, directory, **settings)
    lines = Path(report.directory, "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_texts_have_the_digits_of_evaluate(lm: IngotLM, directory: Path, tmp_path: Path) -> None:
    """Also those that are longer than the context."""
    texts = ["Hello world", "ab", "".join(chr(97 + n * n % 26) for n in range(400))]
    found = lm.loglikelihood_rolling(instances(*[(text,) for text in texts]))
    ours = evaluate(directory, tmp_path, [{"text": text} for text in texts])
    assert found == [one["logprob"] for one in ours]
    assert [one["num_bytes"] for one in ours] == [len(text) for text in texts]
    assert lm.loglikelihood_rolling(instances(("",))) == [0.0]
    assert lm.llm.tokenizer.encode("a")[0] == lm.prefix_token_id


def test_choices_have_the_digits_of_evaluate(lm: IngotLM, directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"The number {n} is", "choices": ["odd", "even"], "answer": 0} for n in "12"]
    pairs = [(row["prompt"], f" {choice}") for row in rows for choice in row["choices"]]
    found = [logprob for logprob, _ in lm.loglikelihood(instances(*pairs))]
    ours = evaluate(directory, tmp_path, rows)
    assert found == [logprob for one in ours for logprob in one["logprobs"]]


def test_answers_have_the_text_of_evaluate(lm: IngotLM, directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} plus {n} is", "answer": "x"} for n in range(6)]
    free = evaluate(directory, tmp_path, rows, max_tokens=8)
    stop = free[0]["output"][4:6]
    ours = evaluate(directory, tmp_path, rows, max_tokens=8, stop=[stop])
    settings = {"until": [stop], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    found = lm.generate_until(instances(*[(row["prompt"], settings) for row in rows]))
    assert found == [one["output"] for one in ours]
    assert found[0] != free[0]["output"]


def test_a_continuation_is_greedy_if_it_is_what_would_be_generated(lm: IngotLM) -> None:
    greedy = lm.llm.generate("abc", max_tokens=3, ignore_eos=True).token_ids
    context = lm.llm.tokenizer.encode("abc")
    wrong = (greedy[0], (greedy[1] + 1) % 256, greedy[2])
    sequences = [([*context, *tokens], len(context)) for tokens in (greedy, wrong)]
    scores = list(lm._score(sequences, top=1))
    assert [greedy for _, greedy in scores] == [True, False]
    assert len(scores[0][0]) == 3


def test_an_empty_context_is_the_prefix_token(lm: IngotLM) -> None:
    ((logprob, _),) = lm.loglikelihood(instances(("", "abc")))
    ids = [lm.prefix_token_id, *lm.llm.tokenizer.encode("abc", add_special_tokens=False)]
    assert logprob == lm.llm.score(ids).logprob


def test_a_long_context_loses_its_beginning(lm: IngotLM) -> None:
    context, size = "".join(chr(97 + n * n % 26) for n in range(300)), lm.llm.max_seq_len - 1
    ((logprob, _),) = lm.loglikelihood(instances((context, "xyz")))
    ids = lm.llm.tokenizer.encode(context + "xyz")[-size:]
    assert logprob == math.fsum(lm.llm.score(ids).logprobs[-3:])
    (text,) = lm.generate_until(instances((context, {"max_gen_toks": 28})))
    prompt = lm.llm.tokenizer.encode(context)[-100:]
    assert text == lm.llm.generate(prompt, max_tokens=28).text


def test_generation_settings(lm: IngotLM) -> None:
    hot = {"until": None, "do_sample": True, "temperature": 2.0, "seed": 7, "max_gen_toks": 4}
    (text,) = lm.generate_until(instances(("abc", hot)))
    params = SamplingParams(temperature=2.0, seed=7)
    assert text == lm.llm.generate("abc", params, max_tokens=4).text
    with pytest.raises(ConfigError, match="'num_beams' is not supported"):
        lm.generate_until(instances(("abc", {"num_beams": 4})))


def test_chat_templates(lm: IngotLM) -> None:
    assert lm.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<user>Hi<answer>"
    assert lm.chat_template(True) == models.TEMPLATE
    assert lm.chat_template(False) == ""
    assert "/" not in lm.tokenizer_name
    # A text that begins with BOS, as templates write it, gets no second one.
    assert lm._encode("!ab", bos=True) == lm._encode("ab", bos=True)


def test_an_unavailable_device_falls_back(directory: Path) -> None:
    """lm-eval passes its default, a GPU, on every machine."""
    assert IngotLM(str(directory), device="cuda:99", batch_size=1).llm.decoder.device is not None


@pytest.mark.skipif(HARNESS, reason="lm-eval is installed")
def test_a_missing_harness_is_an_error() -> None:
    with pytest.raises(IngotError, match="lm-eval needs the package lm_eval"):
        lm_eval.main()


@pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed")
def test_the_command_runs_a_local_task(directory: Path, tmp_path: Path) -> None:
    rows = [{"text": "Hello world"}, {"text": "The quick brown fox"}]
    ours = evaluate(directory, tmp_path, rows)
    (tmp_path / "texts.yaml").write_text(
        "task: texts\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'task.jsonl'}}}}}\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: bits_per_byte}]\n'
    )
    command = [sys.executable, "-m", "ingot.workflows.lm_eval", "run", "--model", "ingot"]
    command += ["--model_args", f"model={directory}", "--tasks", "texts"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = tmp_path.glob("out_*.json")
    found = json.loads(path.read_text())["results"]["texts"]["bits_per_byte,none"]
    total = sum(-one["logprob"] for one in ours) / sum(one["num_bytes"] for one in ours)
    assert found == total / math.log(2)
