"""`ingot.LLM`: batches, streams, chats and scores over the engine."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
from ingot import ops
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf, peft
from ingot.nn import BatchLayout
from ingot.nn.loss import sampled_logprobs
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.verify import trained_decoder
from ingot.workflows.llm import LLM, Completion, CompletionChunk
from tests import adapters, models, oracle

HOT = SamplingParams(temperature=2.0, seed=3)
GREEDY = SamplingParams(temperature=0.0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Pinned: they change only if the weights, the template or the numbers do.
ANSWER = (504, 3575, 282, 4649, 314, 7042, 30, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.small(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(directory)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> LLM:
    return LLM(smollm2)


def assert_trainer_recomputes(llm: LLM, texts: list[str], max_tokens: int) -> None:
    """Check that processed log-probabilities are bitwise those of `sampled_logprobs`."""
    grid = [
        (t, k, p, m)
        for t in (0.7, 1.0, 1.3)
        for k, p, m in ((None, 1.0, 0.0), (20, 1.0, 0.0), (None, 0.9, 0.0), (50, 0.95, 0.05))
    ]
    params = [
        SamplingParams(
            temperature=t, top_k=k, top_p=p, min_p=m, seed=i, logprobs=0, logprobs_mode="processed"
        )
        for i, (t, k, p, m) in enumerate(grid)
    ]
    prompts = [texts[i % len(texts)] for i in range(len(params))]
    for one, found in zip(
        params, llm.generate(prompts, params, max_tokens=max_tokens), strict=True
    ):
        tokens = torch.tensor([*found.prompt_token_ids, *found.token_ids])
        reported = torch.tensor([entry.logprob for entry in found.logprobs or ()])
        with torch.no_grad():
            trained = sampled_logprobs(
                llm.decoder, tokens[:-1], tokens[1:], [len(tokens) - 1],
                temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p,
            )  # fmt: skip
        assert torch.equal(trained[-len(reported) :], reported), one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_recomputes_processed_logprobs_bitwise(
    directory: Path, dtype: torch.dtype
) -> None:
    llm = LLM(directory)
    llm.decoder.to(dtype)
    assert_trainer_recomputes(llm, ["Hello", "The quick brown fox", "x"], 8)


def test_a_trainer_recomputes_processed_logprobs_of_a_real_model_bitwise(real: LLM) -> None:
    assert_trainer_recomputes(real, ["The capital of France is", "def add(a, b):"], 6)


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm: LLM) -> None:
    one = llm.generate("Hello", HOT, max_tokens=5)
    assert isinstance(one, Completion)
    assert one.prompt == "Hello"
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode("Hello"))
    assert (len(one.token_ids), one.finish_reason) == (5, "length")
    assert one.text == str(one) == llm.tokenizer.decode(one.token_ids)
    assert [c.text for c in llm.generate(["Hello"], HOT, max_tokens=5)] == [one.text]
    ids = llm.tokenizer.encode("Hello")
    from_ids = llm.generate(ids, HOT, max_tokens=5)
    assert (from_ids.prompt, from_ids.token_ids) == (None, one.token_ids)
    assert [c.token_ids for c in llm.generate([ids], HOT, max_tokens=5)] == [one.token_ids]
    assert llm.generate([]) == []


def test_adapters_are_named_by_each_call(directory: Path, tmp_path: Path) -> None:
    decoder = hf.load(directory)
    paths = {name: adapters.save(decoder, tmp_path / name, len(name)) for name in ("a", "bb")}
    llm = LLM(directory, adapters=paths, max_loras=3)
    assert llm.adapters == ("a", "bb")
    texts = [llm.generate("Hello", max_tokens=9, adapter=name).text for name in ("", "a", "bb")]
    assert len(set(texts)) == 3
    for name, text in zip(("a", "bb"), texts[1:], strict=True):
        trained = trained_decoder(llm.decoder, peft.load(paths[name], llm.decoder))
        ids = oracle.generate(trained, llm.tokenizer.encode("Hello"), 9, GREEDY)
        assert llm.tokenizer.decode(ids) == text
    streams = [llm.stream("Hello", max_tokens=9, adapter=name) for name in ("", "a", "bb")]
    mixed = ["", "", ""]
    while parts := [next(stream, None) for stream in streams]:
        if not any(parts):
            break
        for index, part in enumerate(parts):
            mixed[index] += part.text if part else ""
    assert mixed == texts
    scores = [llm.score("Hello", adapter=name) for name in ("", "a")]
    assert scores[0] != scores[1]
    chat = [llm.chat(QUESTION, max_tokens=4, adapter=name).text for name in ("", "bb")]  # type: ignore
    assert chat[0] != chat[1]
    llm.load_adapter("ccc", paths["a"])
    assert llm.generate("Hello", max_tokens=9, adapter="ccc").text == texts[1]
    llm.unload_adapter("ccc")
    with pytest.raises(UnknownName, match="ccc"):
        llm.generate("Hello", adapter="ccc")
    with pytest.raises(UnknownName, match="dddd"):
        llm.stream("Hello", adapter="dddd")


def test_a_batch_gets_what_each_prompt_gets_alone(llm: LLM) -> None:
    prompts = [chr(97 + i) * (3 * i + 1) for i in range(12)]
    params = [SamplingParams(temperature=i % 3, seed=i) for i in range(12)]
    batch = llm.generate(prompts, params, max_tokens=9)
    for prompt, one, completion in zip(prompts, params, batch, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert list(completion.token_ids) == oracle.generate(llm.decoder, ids, 9, one)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_completions_are_those_without_a_cache(
    llm: LLM, prompt: list[int], temperature: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=seed)
    completion = llm.generate(prompt, params, max_tokens=6)
    assert list(completion.token_ids) == oracle.generate(llm.decoder, prompt, 6, params)


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    count = 3 * llm.engine.config.max_num_seqs
    completions = llm.generate([[i % 50] for i in range(count)], max_tokens=1)
    assert len(completions) == count
    assert [c.token_ids for c in completions[:50]] == [c.token_ids for c in completions[50:100]]


def test_an_iterator_is_read_as_the_engine_gets_to_it(llm: LLM) -> None:
    max_active, taken = 2 * llm.engine.config.max_num_seqs, list[int]()
    count = 2 * max_active

    def prompts() -> Iterator[list[int]]:
        for number in range(count):
            taken.append(number)
            yield [number % 50]

    params = (SamplingParams(temperature=2.0, seed=number) for number in range(count))
    stream = llm.stream(prompts(), params, max_tokens=1)
    tokens = dict[int, tuple[int, ...]]()
    for chunk in stream:
        assert len(taken) - len(tokens) <= max_active
        tokens[chunk.index] = chunk.token_ids
    assert taken == list(range(count))
    params = [SamplingParams(temperature=2.0, seed=number) for number in range(count)]
    listed = llm.generate([[number % 50] for number in range(count)], params, max_tokens=1)
    assert [tokens[number] for number in range(count)] == [one.token_ids for one in listed]


def test_an_error_of_an_iterator_ends_its_stream_only(llm: LLM) -> None:
    with pytest.raises(ValueError, match="zip"):
        list(llm.stream(iter(["a", "b"]), iter([HOT]), max_tokens=1))
    with pytest.raises(IngotError, match="expected 1 to 255 tokens, got 300"):
        list(llm.stream(iter(["a", "b" * 300]), HOT, max_tokens=1))
    assert len(llm.generate("a", HOT, max_tokens=3).token_ids) == 3
    assert llm.engine.stats().num_running == 0


def test_a_stream_has_the_text_of_the_completion(llm: LLM) -> None:
    whole = llm.generate(["abc", "de"], HOT, max_tokens=6)
    chunks = list(llm.stream(["abc", "de"], HOT, max_tokens=6))
    for index, completion in enumerate(whole):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(map(str, own)) == completion.text
        assert tuple(t for chunk in own for t in chunk.token_ids) == completion.token_ids
        assert [chunk.finish_reason for chunk in own] == [None] * 5 + ["length"]


def test_streams_may_be_interleaved_and_closed(llm: LLM) -> None:
    expected = llm.generate(["abc", "de"], HOT, max_tokens=8)
    first, second = (llm.stream(prompt, HOT, max_tokens=8) for prompt in ("abc", "de"))
    texts = ["", ""]
    for chunk in first:
        texts[0] += chunk.text
        texts[1] += next(second).text
    assert texts == [completion.text for completion in expected]
    abandoned = llm.stream("x", HOT, max_tokens=50)
    next(abandoned)
    abandoned.close()  # type: ignore
    assert llm.generate("abc", HOT, max_tokens=8) == expected[0]
    assert llm.engine.stats().num_running == 0


def test_stop_strings_and_stop_tokens_end_a_completion(llm: LLM) -> None:
    free = llm.generate("abc", HOT, max_tokens=12)
    stop = free.text[4:6]
    assert stop not in free.text[:4]
    stopped = llm.generate("abc", HOT, max_tokens=12, stop=stop)
    assert (stopped.text, stopped.finish_reason) == (free.text[:4], "stop")
    token = free.token_ids[3]
    assert token not in free.token_ids[:3]
    params = SamplingParams(temperature=2.0, seed=3, stop_token_ids=(token,))
    by_token = llm.generate("abc", params, max_tokens=12)
    assert by_token.token_ids == free.token_ids[:4]
    assert by_token.text == llm.tokenizer.decode(free.token_ids[:3])
    assert by_token.finish_reason == "stop"


def test_logprobs_are_those_of_a_packed_forward(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=3, logprobs=2, prompt_logprobs=0)
    completion = llm.generate("Hello", params, max_tokens=4)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    found = [one.logprob for one in (*completion.prompt_logprobs, *completion.logprobs)]
    assert found == packed_logprobs(llm, ids)
    assert all(len(one.top) == 2 for one in completion.logprobs)


def packed_logprobs(llm: LLM, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        hidden = llm.decoder(torch.tensor(ids), BatchLayout.packed([len(ids)]))
        return llm.decoder.logprobs(hidden[:-1], torch.tensor(ids[1:])).tolist()


def test_scores_are_bitwise_those_of_a_packed_forward(llm: LLM) -> None:
    texts = ["Hello", "a longer text of several words"]
    for text, score in zip(texts, llm.score(texts), strict=True):  # type: ignore
        ids = llm.tokenizer.encode(text)
        assert list(score.logprobs) == packed_logprobs(llm, ids)
        assert score.perplexity == pytest.approx(math.exp(-score.logprob / (len(ids) - 1)))
    assert llm.score(texts[0]).token_ids == tuple(llm.tokenizer.encode(texts[0]))  # type: ignore


def test_a_prefix_is_computed_once(llm: LLM) -> None:
    prompt = list(range(100))
    first, second = (llm.generate(prompt, max_tokens=2) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96


def test_an_interrupted_step_leaves_a_usable_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, engine = llm.generate("abc", max_tokens=6), llm.engine
    other = llm.stream("other", max_tokens=6)
    next(other)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", max_tokens=6)
    assert llm.generate("abc", max_tokens=6).token_ids == expected.token_ids
    with pytest.raises(IngotError, match="interrupted"):
        next(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(""), "give some text"),
        (lambda llm: llm.generate("x" * 10**5), "shorten the prompt"),
        (lambda llm: llm.generate("x", max_tokens=0), "max_tokens: expected at least 1"),
        (lambda llm: llm.generate([1, 10**6]), "vocabulary"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "one for each of 2 prompts"),
        (lambda llm: llm.score("x"), "at least 2 tokens"),
    ],
)
def test_wrong_arguments_are_errors_with_hints(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises((ConfigError, IngotError), match=message):
        call(llm)
    assert llm.generate("a", max_tokens=1).token_ids


def test_a_failing_step_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    with pytest.raises(IngotError, match="prompt 0: out of memory"):
        llm.generate("abc")


@pytest.mark.parametrize("kind", ["ngram", "int4"])
def test_speculation_changes_nothing(directory: Path, llm: LLM, kind: Any) -> None:
    prompts = ["abcabcabc", "xyxyxyxy"]
    drafted = LLM(directory, speculate=kind).generate(prompts, max_tokens=20)
    assert [c.text for c in drafted] == [c.text for c in llm.generate(prompts, max_tokens=20)]


def test_the_4_bit_copy_is_a_part_of_loading(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[str] = []
    llm = LLM(directory, speculate="int4", on_status=statuses.append)
    assert "4 bits" in statuses[-1]

    def fail(*_: Any) -> None:
        raise AssertionError("quantized again, by the first request")

    monkeypatch.setattr("ingot.serving.engine.speculate.quantized_copy", fail)
    assert llm.generate("a", max_tokens=1).token_ids


def test_the_device_and_the_dtype_are_settings(directory: Path) -> None:
    llm = LLM(directory, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in llm.decoder.parameters()} == {torch.bfloat16}
    with pytest.raises(IngotError, match="unknown device 'gpu'"):
        LLM(directory, device="gpu")


def test_it_knows_the_capital_of_france(real: LLM) -> None:
    answer = real.chat(QUESTION)
    assert isinstance(answer, Completion)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
    assert answer.token_ids == ANSWER
    both = real.chat([QUESTION, QUESTION])
    assert isinstance(both, list)
    assert [one.token_ids for one in both] == [ANSWER, ANSWER]


def test_a_seed_repeats_and_another_differs(real: LLM) -> None:
    def text(seed: int) -> str:
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=seed)
        return real.generate("The sun", params, max_tokens=8).text

    assert text(7) == text(7) != text(8)


def test_perplexity_is_that_of_transformers(real: LLM, smollm2: Path) -> None:
    """On the same weights, which it computes with in float32, over the head of a module."""
    text = Path(argparse.__file__).read_text()[:6000]
    ids = torch.tensor(real.tokenizer.encode(text))[:1024]
    with torch.inference_mode():
        hidden = real.decoder(ids[:-1], BatchLayout.packed([len(ids) - 1]))
        losses = ops.linear_cross_entropy(hidden, real.decoder.lm_head_weight, ids[1:])
        theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2, dtype=torch.float32
        )
        logits = theirs_model(ids[None, :-1]).logits[0]
        theirs = torch.nn.functional.cross_entropy(logits, ids[1:])
    assert abs(math.exp(losses.mean()) / math.exp(theirs) - 1) < 0.005
    score = real.score(ids.tolist())
    assert not isinstance(score, list)
    assert score.logprobs == tuple((-losses).tolist())


IMPORTS = """
import sys
import ingot
llm = ingot.LLM(sys.argv[1])
print(llm.generate(["Hello", "Once upon a time"], max_tokens=3))
late = {"torch._dynamo", "sympy", "fastapi", "uvicorn", "llguidance", "transformers"}
assert not late & set(sys.modules), late & set(sys.modules)
"""


def test_the_facade_imports_neither_a_server_nor_a_compiler(directory: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("[Completion(prompt='Hello', text=")
    assert "finish_reason='length'), Completion(prompt='Once upon a time'" in result.stdout


def test_chunks_are_of_one_type(llm: LLM) -> None:
    stream: Iterator[CompletionChunk] = llm.stream("a", max_tokens=1)
    assert [type(chunk) for chunk in stream] == [CompletionChunk]
    assert ingot.LLM is LLM


def test_scores_with_an_int8_cache_are_those_of_a_packed_forward(directory: Path) -> None:
    llm = LLM(directory, kv_cache_dtype="int8", dtype=torch.bfloat16)
    text = list(range(1, 200))
    layout = BatchLayout.packed([len(text)])
    with torch.inference_mode():
        hidden = llm.decoder(torch.tensor(text), layout)
        expected = llm.decoder.logprobs(hidden[:-1], torch.tensor(text[1:])).tolist()
    assert list(llm.score(text).logprobs) == expected
    assert list(LLM(directory, dtype=torch.bfloat16).score(text).logprobs) != expected
