"""Serving on an accelerator, the fake one: the results of the CPU, and one copy each way per step.

Ops compute there with the kernels of the CPU, so results are equal bitwise. What is checked is
everything between the ops: where tensors are, what is copied and where the host waits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.conftest import serving
from tests.test_fake_device import run_script

COMMON = """
import json
from pathlib import Path
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.engine.speculate import DraftModelProposer, NgramProposer

PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"seed": 3, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"seed": 4, "presence_penalty": 1.0, "repetition_penalty": 1.3, "logprobs": 0},
    "bias": {"seed": 5, "logit_bias": ((5, 3.0), (6, 1.0), (5, 0.3))},
    "grammar": {"seed": 6, "grammar": Grammar(kind="regex", text="(ab|c){40}")},
    "all": {"seed": 7, "frequency_penalty": 0.5, "logit_bias": ((66, 3.0),), "logprobs": 3,
            "grammar": Grammar(kind="regex", text="[a-z]{40}"), "logprobs_mode": "processed"},
    "processed": {"temperature": 0.5, "logprobs": 3, "logprobs_mode": "processed"},
}

def make_engine(device, proposer=None, **limits):
    decoder = Decoder.from_config(preset("tiny"), seed=0).to(device)
    config = SchedulerConfig(num_blocks=64, **limits)
    if proposer == "draft":
        proposer = DraftModelProposer(decoder, config, num_speculative_tokens=3)
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    return Engine(decoder, scheduler_config=config, tokenizer=tokenizer, proposer=proposer)

def add(engine, names, prompt=(5, 6, 7, 5, 6, 7, 5), max_tokens=12):
    for id, name in enumerate(names):
        params = SamplingParams(**PARAMS[name])
        engine.add_request(
            Request(id=id, prompt=prompt, max_tokens=max_tokens, sampling_params=params)
        )
    while engine._compiling:
        engine._add_compiled()
"""


@pytest.mark.parametrize("proposer", ["None", "NgramProposer(n=1)", '"draft"'])
def test_outputs_equal_those_of_the_cpu(directory: Path, proposer: str) -> None:
    # By request: when their grammars are compiled decides in which order the last two are queued.
    code = f"""
def generate(device):
    engine = make_engine(device, {proposer}, max_num_batched_tokens=24, max_num_seqs=8)
    add(engine, PARAMS)
    outputs = {{name: ([], [], []) for name in PARAMS}}
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None, output.error
            tokens, logprobs, prompt_logprobs = outputs[list(PARAMS)[output.id]]
            tokens += output.tokens
            logprobs += output.logprobs or ()
            prompt_logprobs += output.prompt_logprobs or ()
    return outputs, engine.stats()

(device, stats), (cpu, _) = generate(fake_device.DEVICE), generate("cpu")
assert device == cpu
for name, (tokens, logprobs, prompt_logprobs) in device.items():
    assert len(logprobs) == (len(tokens) if "logprobs" in PARAMS[name] else 0)
    assert len(prompt_logprobs) == (6 if name == "logprobs" else 0)
print(sum(len(tokens) for tokens, _, _ in device.values()), stats.accepted_tokens)
"""
    tokens, accepted = map(int, run_script(COMMON + code, str(directory)).split())
    assert tokens > 60
    assert (accepted > 0) == (proposer != "None")


def test_random_schedules_are_bitwise_equal_to_packed_forwards() -> None:
    code = """
from ingot.nn import Decoder, preset
from ingot.serving.verify import verify
found = verify(Decoder.from_config(preset("tiny"), seed=0).to(fake_device.DEVICE), schedules=6)
print(found.bitwise_equal, found.logprobs > 100, found.accepted_tokens > 0)
"""
    assert run_script(code) == "True True True\n"


def test_llm_generates_and_scores(directory: Path) -> None:
    code = """
import ingot
texts = []
for device in ("cpu", "fake"):
    llm = ingot.LLM(sys.argv[1], device=device)
    texts.append([llm.generate("Hello", max_tokens=8).text, llm.score("Hello").logprobs])
assert str(llm.decoder.device) == "fake:0"
assert texts[0] == texts[1], texts
print(len(texts[0][1]))
"""
    assert run_script(code, str(directory)) == "4\n"


def test_server_answers_with_the_tokens_of_the_cpu(directory: Path, tmp_path: Path) -> None:
    answers = []
    for device in ("fake", "cpu"):
        folder = tmp_path / device
        folder.mkdir()
        module = "tests.serving.on_fake_device"
        with serving(directory, folder, "--device", device, module=module) as served:
            answers.append(served.tokens(count=8))
    assert answers[0] == answers[1]
    assert len(answers[0]["tokens"]) == 8


# Copies to the device, copies to the host, and points at which the host waits, in a decode step
# whose requests are those of the step before. The inputs go in one copy, and all results come back
# in one, for which the host has to wait: it schedules the next step by the tokens. Counts of
# generated tokens and grammar masks depend on these tokens: one more copy, without waiting.
STEADY = {
    "greedy": (1, 1, 1),
    "sampled": (1, 1, 1),
    "logprobs": (1, 1, 1),
    "processed": (1, 1, 1),
    "bias": (1, 1, 1),
    "penalties": (2, 1, 1),
    "grammar": (2, 1, 1),
    "all": (2, 1, 1),
}


def test_a_decode_step_copies_once_each_way(directory: Path) -> None:
    code = """
def count(names):
    engine = make_engine(fake_device.DEVICE)
    add(engine, names)
    counts = []
    for _ in range(5):
        before = fake_device.COUNTS.snapshot()
        assert len(engine.step()) == len(names), names
        counts.append(list(vars(fake_device.COUNTS.since(before)).values()))
    assert counts[-1] == counts[-2], counts
    return counts[-1]

print(json.dumps({name: count([name] * 3) for name in PARAMS} | {"mixed": count(list(PARAMS))}))
"""
    counts = json.loads(run_script(COMMON + code, str(directory)))
    assert {name: tuple(count) for name, count in counts.items()} == STEADY | {"mixed": (2, 1, 1)}


def test_prefill_waits_only_to_sample(directory: Path) -> None:
    """A chunk of a prompt is one copy. The last one also copies the sampling parameters, which stay
    on the device while the rows of the batch belong to the same requests."""
    code = """
engine = make_engine(fake_device.DEVICE, max_num_batched_tokens=16, max_num_seqs=2)
budget = engine.config.prefill_only_budget
add(engine, ["greedy"], prompt=tuple(range(budget + 5)), max_tokens=2)
for _ in range(3):
    before = fake_device.COUNTS.snapshot()
    engine.step()
    print(*vars(fake_device.COUNTS.since(before)).values())
"""
    lines = run_script(COMMON + code, str(directory)).splitlines()
    assert lines == ["1 0 0", "2 1 1", "1 1 1"]
