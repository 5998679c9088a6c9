"""Every optimizer against its paper over 100 steps, parameter groups, and bitwise states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ingot.core.config import load
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.nn import Decoder, preset
from ingot.training import optimizer as configs
from ingot.training.optimizer import Optimizers, select_decayed
from ingot.training.precision import MasterWeights, Precision
from tests.training import papers

STEPS = 100
SHAPES = {"matrix.weight": (7, 5), "vector": (11,), "image.weight": (3, 2, 3, 3)}
ALL: list[Any] = [
    configs.AdamWConfig(lr=1e-2),
    configs.AdamWConfig(lr=1e-2, state_dtype="bf16"),
    configs.SGDConfig(lr=1e-2, weight_decay=0.05),
    configs.SGDConfig(lr=1e-2, nesterov=True),
    configs.SGDConfig(lr=1e-2, momentum=0.0),
    configs.MuonConfig(lr=1e-2),
    configs.LionConfig(lr=1e-2),
    configs.LAMBConfig(lr=1e-2),
    configs.LARSConfig(lr=1.0, weight_decay=1e-2),
    configs.SOAPConfig(lr=1e-2, precondition_frequency=3),
]
NAMES = [f"{config.kind}{index}" for index, config in enumerate(ALL)]


class Odd(nn.Module):
    """A matrix, a vector and a convolution; the vector begins at 0, as a bias does."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.matrix = nn.Linear(5, 7, bias=False)
        self.vector = nn.Parameter(torch.zeros(11))
        self.image = nn.Conv2d(2, 3, 3, bias=False)
        for parameter in (self.matrix.weight, self.image.weight):
            nn.init.normal_(parameter, generator=random)


def gradients(steps: int = STEPS) -> dict[str, list[Tensor]]:
    """Of sizes from 1e-3 to 1, some entries always 0."""
    random = torch.Generator().manual_seed(2)
    found: dict[str, list[Tensor]] = {}
    for name, shape in SHAPES.items():
        scale = 10 ** torch.empty(shape).uniform_(-3, 0, generator=random)
        keep = torch.rand(shape, generator=random) > (0.1 if name != "matrix.weight" else 0.0)
        drift = torch.randn(shape, generator=random)
        found[name] = [
            (drift + torch.randn(shape, generator=random)) * scale * keep for _ in range(steps)
        ]
    return found


def run(model: nn.Module, optimizers: Optimizers, grads: dict[str, list[Tensor]]) -> None:
    for step in range(len(next(iter(grads.values())))):
        optimizers.step({name: of_all[step].clone() for name, of_all in grads.items()})
    assert all(parameter.grad is None for parameter in model.parameters())


def expected(config: Any, name: str, w: Any, grads: list[Any], bases: Any) -> Any:
    decay = config.weight_decay if name != "vector" else 0.0
    match config:
        case configs.AdamWConfig():
            b1, b2 = config.betas
            return papers.adamw(w, grads, lr=config.lr, b1=b1, b2=b2, eps=config.eps, decay=decay)
        case configs.SGDConfig():
            options = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
            return papers.sgd(w, grads, decay=decay, **options)
        case configs.LionConfig():
            b1, b2 = config.betas
            return papers.lion(w, grads, lr=config.lr, b1=b1, b2=b2, decay=decay)
        case configs.LAMBConfig():
            b1, b2 = config.betas
            options = {"lr": config.lr, "b1": b1, "b2": b2, "eps": config.eps}
            return papers.lamb(w, grads, decay=decay, adapt=name != "vector", **options)
        case configs.LARSConfig():
            options = {
                "lr": config.lr,
                "momentum": config.momentum,
                "trust": config.trust_coefficient,
            }
            return papers.lars(w, grads, decay=decay, adapt=name != "vector", **options)
        case _ if name != "matrix.weight":
            other = configs.AdamWConfig(lr=config.adamw_lr, weight_decay=config.weight_decay)
            return expected(other, name, w, grads, bases)
        case configs.MuonConfig():
            options = {"lr": config.lr, "momentum": config.momentum}
            # The paper's iteration is for wide matrices; it turns the tall ones.
            return papers.muon(w.T, [g.T for g in grads], decay=decay, **options).T
        case _:
            b1, b2 = config.betas
            options = {"lr": config.lr, "b1": b1, "b2": b2, "eps": config.eps}
            return papers.soap(
                w, grads, bases, decay=decay, every=config.precondition_frequency, **options
            )


@pytest.mark.parametrize("config", ALL, ids=NAMES)
def test_100_steps_are_the_papers(config: Any) -> None:
    model, grads = Odd(), gradients()
    before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    optimizers = Optimizers(config, model)
    run(model, optimizers, {name: grads[name][:1] for name in grads})
    bases = _bases(optimizers, grads["matrix.weight"][0])
    run(model, optimizers, {name: grads[name][1:] for name in grads})
    for name, parameter in model.named_parameters():
        exact = [g.double().numpy() for g in grads[name]]
        wanted = expected(config, name, before[name], exact, bases)
        found = parameter.detach().double().numpy()
        moved = np.abs(wanted - before[name]).max()
        assert moved > 1e-3
        # Muon iterates in bfloat16, whose steps are 2^-8, and AdamW may have its moments in it; the
        # others are in float32 all along. And a weight in float32 is rounded at every step, by at
        # most half a unit in its last place.
        muon = config.kind == "muon" and name == "matrix.weight"
        bound = 2e-2 if muon or getattr(config, "state_dtype", "") == "bf16" else 1e-5
        rounding = STEPS * 2**-24 * np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= bound * moved + rounding, name


def _bases(optimizers: Optimizers, first: Tensor) -> Any:
    """SOAP's own first bases, for they are not unique; that they are eigenvectors is checked."""
    state, found = optimizers.state_dict(), []
    for side, moments in (("left", first @ first.T), ("right", first.T @ first)):
        if f"matrix.weight|{side}_basis" not in state:
            return None
        basis = state[f"matrix.weight|{side}_basis"].double().numpy().copy()
        moments = moments.double().numpy()
        turned = basis.T @ moments @ basis
        assert np.abs(turned - np.diag(np.diag(turned))).max() < 1e-6 * np.abs(moments).max()
        assert np.abs(basis.T @ basis - np.eye(len(basis))).max() < 1e-5
        assert np.all(np.diff(np.diag(turned)) <= 1e-6 * np.abs(moments).max())
        found.append(basis)
    return tuple(found)


@pytest.mark.parametrize("config", ALL, ids=NAMES)
def test_a_saved_state_resumes_bitwise(config: Any) -> None:
    grads = gradients(12)
    whole = Odd()
    run(whole, Optimizers(config, whole), grads)
    first = Odd()
    optimizers = Optimizers(config, first)
    run(first, optimizers, {name: grads[name][:5] for name in grads})
    second = Odd()
    second.load_state_dict(first.state_dict())
    resumed = Optimizers(config, second)
    resumed.load_state_dict(optimizers.state_dict())
    run(first, optimizers, {name: grads[name][5:] for name in grads})  # must not disturb `second`
    run(second, resumed, {name: grads[name][5:] for name in grads})
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, dict(second.named_parameters())[name]), name
    assert resumed.state_dict().keys() == optimizers.state_dict().keys()


def test_the_rate_is_of_the_learning_rate_of_every_group() -> None:
    model = Odd()
    optimizers = Optimizers(configs.SGDConfig(lr=1.0, momentum=0.0), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rate in (0.5, 0.25):
        ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        optimizers.step(ones, lr_factor=rate)
        assert not ones
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.75)


@pytest.mark.parametrize("config", ALL, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_come_in_the_models_dtype_with_factors(config: Any, dtype: torch.dtype) -> None:
    """And do what they do multiplied in float32 before."""
    grads = {name: [g.to(dtype) for g in given] for name, given in gradients(3).items()}
    factors = {"matrix.weight": 0.3, "vector": 0.7}
    ours, theirs = Odd(), Odd()
    one, other = Optimizers(config, ours), Optimizers(config, theirs)
    for step in range(3):
        one.step({name: given[step].clone() for name, given in grads.items()}, factors)
        widened = {n: given[step].float() * factors.get(n, 1.0) for n, given in grads.items()}
        other.step(widened)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


@pytest.mark.parametrize(
    "config", [configs.AdamWConfig(), configs.SGDConfig(), configs.LionConfig()], ids=str
)
def test_every_gradient_is_used_once_and_others_stay(config: Any) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2**20, bias=False) for _ in range(5)))  # 8 MiB each
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(config, model)
    grads = {f"{i}.weight": torch.randn(2**20, 2) for i in (1, 2, 4)}
    optimizers.step(grads)
    assert not grads
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name]) == (name in ("0.weight", "3.weight")), name
    steps = [
        int(value) for name, value in optimizers.state_dict().items() if name.endswith("|step")
    ]
    assert set(steps) <= {0, 1}


def test_only_adamw_updates_split_weights() -> None:
    model = Odd()
    masters = MasterWeights(model, Precision.BF16, split=True)
    Optimizers(configs.AdamWConfig(), model, masters.weights, masters.low_bits)
    for config in (configs.SGDConfig(), configs.MuonConfig(), configs.SOAPConfig()):
        with pytest.raises(IngotError, match="split master weights"):
            Optimizers(config, model, masters.weights, masters.low_bits)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "gpt2-124m"])
def test_norms_biases_and_embeddings_do_not_decay(name: str) -> None:
    model = Decoder.on_meta(preset(name))
    decay = select_decayed(model)
    assert decay.keys() == {name for name, _ in model.named_parameters()}
    for parameter, decayed in decay.items():
        plain = "norm" in parameter or parameter.endswith("bias") or "embed" in parameter
        assert decayed is not (plain or "pos_embed" in parameter), parameter


def test_the_head_and_experts_are_no_hidden_matrices() -> None:
    model = Decoder.from_config(preset("tiny-moe"), seed=0)
    matrices = configs._hidden_matrices(model, select_decayed(model))
    assert "lm_head.weight" not in matrices
    assert "blocks.0.attention.qkv.weight" in matrices
    assert "blocks.0.mlp.gate" not in matrices


def test_master_weights_are_updated_instead_of_the_parameters() -> None:
    model = nn.Linear(3, 2).bfloat16()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    optimizers = Optimizers(configs.SGDConfig(lr=1e-3, momentum=0.0), model, masters)
    before = masters["weight"].clone()
    optimizers.step({name: torch.ones_like(p) for name, p in model.named_parameters()})
    torch.testing.assert_close(masters["weight"], before - 1e-3)


def test_a_state_of_another_model_is_rejected() -> None:
    optimizers = Optimizers(configs.AdamWConfig(), Odd())
    with pytest.raises(IngotError, match="not in the model: other"):
        optimizers.load_state_dict({"other|step": torch.zeros(())})


def test_a_model_without_trainable_weights_is_rejected() -> None:
    with pytest.raises(IngotError, match="no parameter"):
        Optimizers(configs.AdamWConfig(), nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("kind", configs.OptimizerConfig.__args__)
def test_bounds(kind: Any) -> None:
    for options in ({"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": float("inf")}):
        with pytest.raises(ConfigError):
            kind(**options)
    if hasattr(kind, "betas"):
        with pytest.raises(ConfigError, match="betas"):
            kind(betas=(0.9, 1.0))


def test_a_recipe_names_its_optimizer() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Recipe:
        optimizer: configs.OptimizerConfig = configs.AdamWConfig()  # noqa: RUF009

    Recipe.__annotations__["optimizer"] = configs.OptimizerConfig
    assert load(
        Recipe, None, ["optimizer.kind=soap", "optimizer.precondition_frequency=5"]
    ).optimizer == (configs.SOAPConfig(precondition_frequency=5))
    with pytest.raises(UnknownName, match="'sopa'"):
        load(Recipe, None, ["optimizer.kind=sopa"])
