"""One step: micro-batches, clipping, loss scales, and dropout by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.data import ArrayBatch, TokenBatch
from ingot.nn import CNN, BatchLayout, CNNConfig, Decoder, Dense, DenseConfig, preset
from ingot.ops.adamw import join
from ingot.training.clip import ClipNormConfig, Clipper
from ingot.training.mixup import MixupConfig
from ingot.training.objective import CrossEntropy
from ingot.training.optimizer import AdamWConfig, Optimizers, SGDConfig
from ingot.training.precision import MasterWeights, Precision
from ingot.training.step import TrainStep, num_rows


def step_of(
    model: Any, precision: Precision = Precision.FP32, seed: int = 0, **losses: Any
) -> TrainStep:
    masters = MasterWeights(model, precision)
    optimizers = Optimizers(SGDConfig(lr=0.5, momentum=0.0), model, masters.weights)
    clipper = Clipper(ClipNormConfig(max_norm=0.1), len(masters.weights))
    return TrainStep(model, masters, optimizers, clipper, CrossEntropy(**losses), seed=seed)


def tokens(lengths: list[int], seed: int = 0) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(256, (2, sum(lengths)), generator=random)
    drawn[1, 1] = -100
    return TokenBatch(drawn[0], drawn[1], lengths, [seed])


def joined(batches: list[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        torch.cat([b.tokens for b in batches]),
        torch.cat([b.targets for b in batches]),
        [length for b in batches for length in b.lengths],
        [i for b in batches for i in b.sample_ids],
    )


def decoder(dropout: float = 0.0) -> Decoder:
    model = Decoder.from_config(preset("tiny"), seed=0)
    model.set_dropout(dropout)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_micro_batches_of_different_sizes_equal_the_whole_batch(dropout: float) -> None:
    pieces = [tokens([9, 30], 0), tokens([2], 1), tokens([17, 1, 5], 2)]
    parts, whole = step_of(decoder(dropout), seed=3), step_of(decoder(dropout), seed=3)
    a, b = parts.forward_backward(pieces, 5), whole.forward_backward([joined(pieces)], 5)
    assert (a.num_targets, a.num_rows) == (b.num_targets, b.num_rows) == (61, 64)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert parts.grads.keys() == parts.master_weights.weights.keys()
    for name, grad in parts.grads.items():
        torch.testing.assert_close(grad, whole.grads[name], rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_the_mean_loss() -> None:
    step = step_of(decoder())
    found = step.forward_backward([tokens([7, 6])], 0)
    wanted = decoder()
    batch = tokens([7, 6])
    layout = BatchLayout.packed([7, 6])
    logits = wanted.logits(wanted(batch.tokens, layout))
    loss = torch.nn.functional.cross_entropy(logits, batch.targets)
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    total = sum(float(p.grad.double().square().sum()) for p in wanted.parameters())  # pyright: ignore
    assert found.grad_norm == pytest.approx(total**0.5, rel=1e-4)
    for name, p in wanted.named_parameters():
        torch.testing.assert_close(step.grads[name], p.grad)


@pytest.mark.parametrize("precision", list(Precision))
def test_an_update_is_the_clipped_gradient(precision: Precision) -> None:
    step = step_of(decoder(), precision)
    before = {name: w.detach().clone() for name, w in step.master_weights.weights.items()}
    found = step.forward_backward([tokens([20])], 0)
    assert found.finite
    assert found.grad_norm > 0.2
    metrics = step.optimizer_step(lr_factor=0.5)
    assert metrics["clip_factor"] == pytest.approx(0.1 / found.grad_norm, rel=1e-3)
    moved = sum(
        float((w.detach() - before[n]).square().sum())
        for n, w in step.master_weights.weights.items()
    )
    assert moved**0.5 == pytest.approx(0.5 * 0.5 * 0.1, rel=1e-2)
    assert not step.grads
    for parameter, (name, master) in zip(
        step.model.parameters(), step.master_weights.weights.items(), strict=True
    ):
        assert torch.equal(parameter, master.to(precision.dtype)), name


def test_split_bf16_weights_follow_whole_master_weights() -> None:
    """Bitwise, from weights that bfloat16 can hold: ties, which do differ, come later."""
    ends: list[dict[str, torch.Tensor]] = []
    for split in (True, False):
        model = decoder().bfloat16()
        masters = MasterWeights(model, Precision.BF16, split)
        optimizers = Optimizers(AdamWConfig(lr=1e-3), model, masters.weights, masters.low_bits)
        clipper = Clipper(ClipNormConfig(max_norm=0.1), len(masters.weights))
        step = TrainStep(model, masters, optimizers, clipper, CrossEntropy())
        step.forward_backward([tokens([20])], 0)
        step.optimizer_step(1.0)
        low, weights = masters.low_bits, masters.weights
        ends.append({n: join(w.detach(), low[n]) if split else w for n, w in weights.items()})
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


def test_precisions_agree() -> None:
    found = {p: step_of(decoder(), p).forward_backward([tokens([20, 4])], 0) for p in Precision}
    for precision in (Precision.BF16, Precision.FP16):
        assert found[precision].loss == pytest.approx(found[Precision.FP32].loss, rel=5e-3)
        assert found[precision].grad_norm == pytest.approx(
            found[Precision.FP32].grad_norm, rel=5e-2
        )


def test_an_overflow_is_seen() -> None:
    step = step_of(decoder(), Precision.FP16)
    step.master_weights.loss_scale = 2.0**40
    assert not step.forward_backward([tokens([20])], 0).finite


def test_a_loss_that_is_not_finite_is_seen() -> None:
    model = decoder()
    with torch.no_grad():
        model.tok_embed.weight[3, 3] = torch.nan
    assert not step_of(model).forward_backward([tokens([20])], 0).finite


def test_former_gradients_are_forgotten() -> None:
    step = step_of(decoder())
    first = step.forward_backward([tokens([20])], 0)
    assert step.forward_backward([tokens([20])], 0) == first


def images(count: int = 6) -> ArrayBatch:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, 8, generator=random)
    return ArrayBatch(x, torch.arange(count) % 3, list(range(count)))


def test_mixed_images_lose_on_both_labels() -> None:
    model = Dense.from_config(DenseConfig(in_features=64, hidden_dims=(), out_features=3), seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # all classes alike: whatever is mixed, the loss is log 3
    step = step_of(model, mixup=MixupConfig(kind="mixup"))
    found = step.forward_backward([images()], 0)
    assert found.loss == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    plain = step_of(CNN.from_config(CNNConfig(widths=(4,), num_classes=3), seed=0))
    mixed = step_of(
        CNN.from_config(CNNConfig(widths=(4,), num_classes=3), seed=0),
        mixup=MixupConfig(kind="cutmix"),
    )
    assert plain.forward_backward([images()], 0).loss != mixed.forward_backward([images()], 0).loss


def test_a_parameter_without_a_gradient_stays() -> None:
    model = decoder()
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(2)))
    step = step_of(model)
    step.forward_backward([tokens([5])], 0)
    step.optimizer_step(1.0)
    assert model.get_parameter("idle").tolist() == [1.0, 1.0]


def test_counts() -> None:
    assert (num_rows(tokens([3, 4])), num_rows(images())) == (7, 6)
    nothing = TokenBatch(torch.zeros(2, dtype=torch.int64), torch.full((2,), -100), [2], [0])
    assert step_of(decoder()).forward_backward([nothing], 0).loss == 0.0
