"""PEFT directories: what PEFT writes is read and written back byte for byte; what an adapter of
another kind, another model or an attacker has is refused before memory is allocated."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ingot.core.errors import IngotError
from ingot.interop import hf, peft
from ingot.interop.peft import CONFIG, WEIGHTS, AdapterError
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int8
from ingot.nn.lora import LoraConfig
from ingot.nn.quantized import quantize_
from ingot.serving.engine.adapters import AdapterPool
from tests import adapters

from .hf_models import MODELS, VOCABULARY

# As PEFT 0.21.2 writes it.
THEIRS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "models/smollm2",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
DECODER = Decoder.on_meta(preset("tiny"))


def tensors(decoder: Decoder, *targets: str, rank: int = 4) -> dict[str, torch.Tensor]:
    """Random tensors for the layers of these names, named as PEFT names them."""
    numbers, made = torch.Generator().manual_seed(1), {}
    for layer, target in peft.target_layers(decoder).items():
        if layer.endswith(targets):
            shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
            for kind, shape in shapes.items():
                name = f"base_model.model.{layer}.lora_{kind}.weight"
                made[name] = 0.1 * torch.randn(shape, generator=numbers)
    return made


def write(directory: Path, changes: dict[str, Any], content: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**THEIRS, **changes}, indent=2, sort_keys=True)
    (directory / CONFIG).write_text(text)
    apart = {name: tensor.clone() for name, tensor in content.items()}
    save_file(apart, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


@pytest.fixture
def content() -> dict[str, torch.Tensor]:
    return tensors(DECODER, "q_proj", "down_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reading_and_writing_keeps_every_byte(
    dtype: torch.dtype, content: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    content = {name: tensor.to(dtype) for name, tensor in content.items()}
    theirs = write(tmp_path / "theirs", {}, content)
    adapter = peft.load(theirs, DECODER)
    peft.save(adapter, tmp_path / "ours")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes()
    assert adapter.digest == peft.load(tmp_path / "ours", DECODER).digest
    assert adapter.nbytes == sum(tensor.nbytes for tensor in content.values())


def test_a_config_of_ours_is_read(content: dict[str, torch.Tensor], tmp_path: Path) -> None:
    config = LoraConfig(rank=4, alpha=6.5)
    ours = peft.new_config(config, ["q_proj", "down_proj"], base="smollm2")
    directory = write(tmp_path, {}, content)
    (directory / CONFIG).write_text(json.dumps(ours))
    assert peft.load(directory, DECODER).scale == 6.5 / 4


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 3}, 0.75),
        ({"lora_alpha": 0.5}, 0.125),
    ],
)
def test_the_scale(changes: Any, scale: float, content: Any, tmp_path: Path) -> None:
    assert peft.load(write(tmp_path, changes, content), DECODER).scale == scale


def test_the_digest_is_that_of_what_is_computed(content: Any, tmp_path: Path) -> None:
    digests = set[str]()
    name = min(content)
    for number, (changes, other) in enumerate(
        [
            ({}, {}),
            ({"lora_alpha": 9}, {}),
            ({}, {name: content[name] + 1}),
            ({}, {name: content[name].bfloat16()}),
        ]
    ):
        directory = write(tmp_path / str(number), changes, {**content, **other})
        digests.add(peft.load(directory, DECODER).digest)
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "DoRA normalizes"),
        ({"rank_pattern": {"q_proj": 8}}, "same rank"),
        ({"alpha_pattern": {"q_proj": 8}}, "same scale"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "B has no bias"),
        ({"modules_to_save": ["lm_head"]}, "own weights"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"layer_replication": [[0, 1]]}, "other layers"),
        ({"task_type": "SEQ_CLS"}, "head"),
        ({"target_parameters": ["experts"]}, "linear layers"),
        ({"use_spectral_norm": True}, "does not know the key"),
        ({"r": 0}, "expected r from 1"),
        ({"r": 10**9}, "expected r from 1"),
        ({"r": 4.0}, "integer"),
        ({"r": True}, "expected r"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_dropout": -1}, "lora_dropout"),
        ({"use_rslora": "yes"}, "boolean"),
        ({"target_modules": None}, "list of names"),
        ({"target_modules": ["q_proj", 7]}, "list of names"),
        ({"target_modules": ["q_proj"]}, "not in target_modules"),
    ],
)
def test_a_config_that_computes_something_else_is_refused(
    changes: Any, message: str, content: Any, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError) as error:
        peft.load(write(tmp_path, changes, content), DECODER)
    assert message in error.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"use_spectral_norm": False, "new_config": None},
        {"target_modules": "all-linear"},
        {"target_modules": "(a+)+$"},
        {"init_lora_weights": "gaussian"},
        {"task_type": None},
    ],
)
def test_a_config_that_computes_the_same_is_read(
    changes: Any, content: Any, tmp_path: Path
) -> None:
    assert peft.load(write(tmp_path, changes, content), DECODER).config == {**THEIRS, **changes}


def test_tensors_that_do_not_fit_are_refused(content: Any, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for number, (changed, message) in enumerate(
        [
            ({name: content[name][:3]}, "shape (4, 64)"),
            ({name: content[name].int()}, "torch.int32"),
            ({"base_model.model.lm_head.weight": torch.zeros(2)}, "lm_head.weight"),
            ({name.replace("layers.0", "layers.9"): content[name]}, "layers.9"),
            ({name.replace("lora_A", "lora_magnitude_vector"): content[name]}, "magnitude"),
        ]
    ):
        directory = write(tmp_path / str(number), {}, {**content, **changed})
        with pytest.raises(AdapterError) as error:
            peft.load(directory, DECODER)
        assert message in error.value.message
    without = {key: tensor for key, tensor in content.items() if key != name}
    with pytest.raises(AdapterError, match="got none"):
        peft.load(write(tmp_path / "without", {}, without), DECODER)
    with pytest.raises(AdapterError, match="no tensors"):
        peft.load(write(tmp_path / "empty", {}, {}), DECODER)


def test_pickles_and_missing_files_are_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=CONFIG):
        peft.load(tmp_path, DECODER)
    directory = write(tmp_path, {}, content)
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        peft.load(directory, DECODER)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=WEIGHTS):
        peft.load(directory, DECODER)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(THEIRS)) | st.text(max_size=9), value=json_values)
def test_any_config_is_read_as_it_is_or_refused(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "any-config"
    write(directory, {key: value}, tensors(DECODER, "q_proj", "down_proj"))
    try:
        adapter = peft.load(directory, DECODER)
    except IngotError:
        return
    assert 1 <= adapter.rank <= peft.MAX_RANK
    assert 0 < adapter.scale <= peft.MAX_ALPHA


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_weights_are_refused_or_of_the_same_shapes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "damaged"
    made = tensors(DECODER, "q_proj", "down_proj")
    path = write(directory, {}, made) / WEIGHTS
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.sampled_from([len(damaged), 100, 2000]))])
    try:
        adapter = peft.load(directory, DECODER)
    except IngotError:
        return
    assert {n: t.shape for n, t in adapter.tensors.items()} == {n: t.shape for n, t in made.items()}


def served_logprobs(directory: Path, adapter: Path | peft.Adapter, tokens: torch.Tensor) -> Any:
    """Log-probabilities of all tokens after each token, with the adapter in a slot."""
    decoder = hf.load(directory)
    AdapterPool(decoder, 2, 8).load("adapter", adapter)
    layout = BatchLayout.packed([len(tokens)])
    slots = torch.zeros(len(tokens), dtype=torch.int32)
    layout = dataclasses.replace(layout, adapters=slots)
    with torch.inference_mode():
        return decoder.logits(decoder(tokens, layout)).log_softmax(-1)


PEFT_MODELS = ("smollm2", "llama-linear-bias", "qwen3", "olmo2", "gpt2", "mixtral", "qwen3-moe")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PEFT_MODELS)
def test_peft_computes_the_same(
    name: str, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """What PEFT saves is served with its log-probabilities; PEFT loads what is saved here."""
    library = pytest.importorskip("peft")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]()).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    decoder = hf.load(tmp_path / "base")
    targets = sorted({layer.rpartition(".")[2] for layer in peft.target_layers(decoder)})
    settings = {"r": 5, "lora_alpha": 12, "target_modules": targets, "task_type": "CAUSAL_LM"}
    theirs = library.get_peft_model(model, library.LoraConfig(**settings, use_rslora=True)).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(7))

    adapter = peft.load(tmp_path / "theirs", decoder)
    peft.save(adapter, tmp_path / "ours")
    for file in (CONFIG, WEIGHTS):
        written = (tmp_path / "ours" / file).read_bytes()
        assert written == (tmp_path / "theirs" / file).read_bytes()
    with torch.inference_mode():
        wanted = theirs(tokens[None]).logits[0].log_softmax(-1)
    found = served_logprobs(tmp_path / "base", tmp_path / "theirs", tokens)
    difference = float((found - wanted).abs().max())
    record_property("difference", difference)
    assert difference < 2e-5

    other = adapters.adapter(decoder, seed=3, rank=4)
    peft.save(other, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = library.PeftModel.from_pretrained(model, tmp_path / "other").eval()
    with torch.inference_mode():
        wanted = loaded(tokens[None]).logits[0].log_softmax(-1)
        base = decoder.logits(decoder(tokens, BatchLayout.packed([60]))).log_softmax(-1)
    found = served_logprobs(tmp_path / "base", other, tokens)
    assert (found - wanted).abs().max() < 2e-5
    assert (found - base).abs().max() > 1e-2, "the adapter changes something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_are_rounded_once(dtype: torch.dtype) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=dtype)
    adapter = adapters.adapter(decoder, 1)
    layer = peft.target_layers(decoder)["model.layers.1.self_attn.v_proj"]
    before = decoder.get_parameter(f"{layer.module}.weight").detach().clone()
    a, b = adapter.weights["model.layers.1.self_attn.v_proj"]
    peft.merge_(decoder, adapter)
    rows = slice(layer.first, layer.first + layer.out_features)
    after = decoder.get_parameter(f"{layer.module}.weight")[rows]
    exact = before[rows].double() + adapter.scale * (b.double() @ a.double())
    assert (after.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert not torch.equal(after, before[rows])


def test_a_trained_adapter_is_saved_and_read_as_it_is(tmp_path: Path) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    config = LoraConfig(rank=3, alpha=6.0, targets=("v_proj", "up_proj"), dropout=0.1)
    decoder.add_lora(config, seed=1)
    for pair in decoder.lora_weights().values():
        pair.b.normal_(0, 0.1)
    peft.save(peft.from_weights(decoder.lora_weights(), config, decoder, "base"), tmp_path / "a")
    found = peft.load(tmp_path / "a", Decoder.on_meta(preset("tiny")))
    assert found.config["target_modules"] == ["up_proj", "v_proj"]
    assert (found.config["lora_dropout"], found.scale) == (0.1, 2.0)
    weights = peft.lora_weights(found, decoder)
    assert weights.keys() == decoder.lora_weights().keys()
    for key, (a, b) in decoder.lora_weights().items():
        assert torch.equal(weights[key].a, a)
        assert torch.equal(weights[key].b, b)


def test_a_quantized_model_has_the_same_layers_and_merges_none() -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    layers = peft.target_layers(decoder)
    adapter = adapters.adapter(decoder, seed=1)
    quantize_(decoder, lambda name: Int8() if name.startswith("blocks.") else None)
    for name, layer in peft.target_layers(decoder).items():
        assert layer[0] == layers[name].key
        assert layer[3:] == layers[name][3:]
    tokens, layout = torch.arange(8), BatchLayout.packed([8])
    layout = dataclasses.replace(layout, adapters=torch.zeros(8, dtype=torch.int32))
    with torch.inference_mode():
        before = decoder(tokens, layout)
        AdapterPool(decoder, 1, adapter.rank).load("adapter", adapter)
        assert not torch.equal(decoder(tokens, layout), before)
    with pytest.raises(AdapterError, match="quantized"):
        peft.merge_(decoder, adapter)
