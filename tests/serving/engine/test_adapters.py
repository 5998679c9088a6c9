"""Adapters by name: slots, unloading under running requests, and blocks that belong to content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.core.errors import ConfigError, UnknownName
from ingot.interop import peft
from ingot.interop.peft import AdapterError
from ingot.nn import Decoder, preset
from ingot.serving.engine.adapters import MAX_LORAS, AdapterPool, parse_adapters
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.verify import trained_decoder
from tests import adapters, oracle

PROMPT = tuple(range(40, 80))
GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)


def make_engine(decoder: Decoder, max_loras: int = 3, count: int = 0) -> Engine:
    """An engine with `count` adapters, named a0, a1..."""
    pool = AdapterPool(decoder, max_loras, 8)
    for number in range(count):
        pool.load(f"a{number}", adapters.adapter(decoder, number))
    config = SchedulerConfig(num_blocks=64, block_size=8)
    return Engine(decoder, scheduler_config=config, adapters=pool)


def request(id: int, adapter: str, max_tokens: int = 6) -> Request:
    return Request(
        id=id, prompt=PROMPT, max_tokens=max_tokens, adapter=adapter, sampling_params=GREEDY
    )


def run(engine: Engine, *requests: Request) -> dict[int, list[Output]]:
    for one in requests:
        engine.add_request(one)
    return finish(engine)


def finish(engine: Engine) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def trained(decoder: Decoder, seed: int, count: int = 6) -> list[int]:
    """What the adapter of this seed writes, computed as in training."""
    reference = trained_decoder(decoder, adapters.adapter(decoder, seed))
    return oracle.generate(reference, list(PROMPT), count, GREEDY)


def test_each_request_gets_what_its_adapter_was_trained_to_write(decoder: Decoder) -> None:
    engine = make_engine(decoder, count=3)
    names = ["a0", "", "a2", "a1", "a2", ""]
    outputs = run(engine, *[request(id, name) for id, name in enumerate(names)])
    wanted = {f"a{seed}": trained(decoder, seed) for seed in range(3)}
    wanted[""] = oracle.generate(decoder, list(PROMPT), 6, GREEDY)
    assert [tokens(outputs[id]) for id in range(6)] == [wanted[name] for name in names]
    assert len({tuple(one) for one in wanted.values()}) == 4, "adapters that change something"


def test_steps_without_an_adapter_are_those_of_the_base(decoder: Decoder) -> None:
    engine = make_engine(decoder, count=1)
    run(engine, request(1, ""))
    assert {shape.adapted for shape in engine.runner._captures} == {False}
    run(engine, request(2, ""), request(3, "a0"))
    assert {shape.adapted for shape in engine.runner._captures} == {False, True}


def test_blocks_belong_to_the_content_of_an_adapter(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    cached: list[int | None] = []
    for seed in (5, 6, 5):
        engine.load_adapter("same", adapters.adapter(decoder, seed), replace=True)
        (output, *rest) = run(engine, request(1, "same"))[1]
        cached.append(output.num_cached_tokens)
        assert tokens([output, *rest]) == trained(decoder, seed)
    assert cached == [0, 0, 32], "of 40 tokens: blocks of 8, and the last token is computed"
    engine.load_adapter("other-name", adapters.adapter(decoder, 5))
    assert run(engine, request(1, "other-name"))[1][0].num_cached_tokens == 32
    assert run(engine, request(1, ""))[1][0].num_cached_tokens == 0


def test_an_unloaded_adapter_finishes_its_requests_and_then_frees_its_slot(
    decoder: Decoder,
) -> None:
    engine = make_engine(decoder, max_loras=1, count=1)
    engine.add_request(request(1, "a0", max_tokens=12))
    begun = engine.step()
    engine.unload_adapter("a0")
    with pytest.raises(UnknownName):
        engine.add_request(request(2, "a0"))
    with pytest.raises(ConfigError, match="all 1 slots are in use"):
        engine.load_adapter("a1", adapters.adapter(decoder, 1))
    assert tokens(begun + finish(engine)[1]) == trained(decoder, 0, 12)
    engine.load_adapter("a1", adapters.adapter(decoder, 1))
    assert tokens(run(engine, request(3, "a1"))[3]) == trained(decoder, 1)


def test_a_replaced_adapter_does_not_change_running_requests(decoder: Decoder) -> None:
    engine = make_engine(decoder, max_loras=2, count=1)
    engine.add_request(request(1, "a0", max_tokens=12))
    begun = engine.step()
    engine.load_adapter("a0", adapters.adapter(decoder, 1), replace=True)
    engine.add_request(request(2, "a0"))
    outputs = finish(engine)
    assert tokens(begun + outputs[1]) == trained(decoder, 0, 12)
    assert tokens(outputs[2]) == trained(decoder, 1)


def test_requests_that_never_run_release_their_slot(decoder: Decoder) -> None:
    engine = make_engine(decoder, max_loras=1, count=1)
    with pytest.raises(UnknownName):
        engine.add_request(request(1, "unknown"))
    wrong = Request(
        id=2,
        prompt=PROMPT,
        max_tokens=2,
        adapter="a0",
        sampling_params=SamplingParams(grammar=Grammar(kind="regex", text="a")),
    )
    with pytest.raises(Exception, match="tokenizer"):
        engine.add_request(wrong)
    engine.add_request(request(3, "a0"))
    engine.abort(3)
    assert finish(engine)[3][-1].finish_reason is FinishReason.CANCELLED
    assert not engine._adapter_slots
    engine.load_adapter("a0", adapters.adapter(decoder, 1), replace=True)


def test_a_failed_load_leaves_the_adapters_as_they_were(decoder: Decoder, tmp_path: Path) -> None:
    engine = make_engine(decoder, max_loras=1, count=1)
    for name, source, error in (
        ("a0", adapters.adapter(decoder, 1), "loaded already"),
        ("new", adapters.adapter(decoder, 1), "slots are in use"),
        ("with space", adapters.adapter(decoder, 1), "invalid name"),
    ):
        with pytest.raises(ConfigError, match=error):
            engine.load_adapter(name, source)
    with pytest.raises(ConfigError, match="rank 9, at most 8"):
        engine.load_adapter("a0", adapters.adapter(decoder, 1, rank=9), replace=True)
    with pytest.raises(AdapterError):
        engine.load_adapter("a0", tmp_path, replace=True)
    assert [one.name for one in engine.adapters.loaded] == ["a0"]
    assert tokens(run(engine, request(1, "a0"))[1]) == trained(decoder, 0)


def test_adapters_of_directories(decoder: Decoder, tmp_path: Path) -> None:
    directories = {
        "one": adapters.save(decoder, tmp_path / "one", 1),
        "two": adapters.save(decoder, tmp_path / "two", 2, rank=24),
    }
    pool = AdapterPool.of(decoder, directories)
    assert (pool.max_loras, pool.max_lora_rank) == (2, 24)
    one = pool.find("one")
    assert (one.rank, one.directory) == (4, str(directories["one"]))
    assert one.digest == peft.load(directories["one"], decoder).digest
    broken = {**directories, "three": tmp_path / "missing"}
    with pytest.raises(AdapterError):
        AdapterPool.of(decoder, broken)
    pool = AdapterPool.of(decoder, broken, max_loras=5, skip_broken=True)
    assert [adapter.name for adapter in pool.loaded] == ["one", "two"]


def test_without_slots_nothing_is_allocated(decoder: Decoder) -> None:
    pool = AdapterPool.of(decoder, {})
    assert not any("lora" in name for name, _ in decoder.named_buffers())
    with pytest.raises(ConfigError, match="all 0 slots"):
        pool.load("a", adapters.adapter(decoder, 0))
    with pytest.raises(ConfigError, match="max_loras"):
        AdapterPool(decoder, MAX_LORAS + 1)


@pytest.mark.parametrize("wrong", ["a", "a=", "=b", "a b=c", "../a=b"])
def test_options_are_names_and_directories(wrong: str) -> None:
    assert parse_adapters(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    with pytest.raises(ConfigError):
        parse_adapters([wrong])
    with pytest.raises(ConfigError, match="each name once"):
        parse_adapters(["a=b", "a=c"])
