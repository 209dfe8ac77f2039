"""Alignment through learned token mixing, against K-wide labels and matrices built by hand."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock, SpatialGatingBlock
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment
from everytoken.models.families import UnsupportedModelError

B, K = 4, 5


KINDS = {
    MixerBlock: {},
    ResBlock: {"mlp_ratio": 2, "norm_layer": Affine, "block_layer": partial(ResBlock, init_values=0.5)},
    SpatialGatingBlock: {"mlp_ratio": 2, "mlp_layer": GatedMlp},
}


def make(block):
    torch.manual_seed(0)
    more = {"block_layer": block, **KINDS[block]}
    model = MlpMixer(num_classes=K, img_size=64, patch_size=16, num_blocks=3, embed_dim=32, **more)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "tokens" in name:
                value.normal_()
    return model.train()


def batch():
    images = torch.randn(B, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, 64, 64)
    for i in range(B):
        mask[i, 10 * i : 40, 20:] = 0
    return images, SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([3, 2, 1, 0]))


def normal(weight):
    out = weight.detach().abs().clone()
    for i in range(out.shape[0]):
        out[i] /= out[i].sum()
    return out


@pytest.mark.parametrize("block", [MixerBlock, ResBlock])
def test_targets_and_gradients_equal_the_k_wide_version(block):
    model = make(block)
    images, mix = batch()
    labels = torch.tensor([0, 1, 4, 2])
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = mix.mask.view(B, 4, 16, 4, 16).mean((2, 4)).view(B, 16, 1)
    y = r * own[:, None] + (1 - r) * partner[:, None]
    for each in model.blocks:
        layers = [each.linear_tokens] if block is ResBlock else [each.mlp_tokens.fc1, each.mlp_tokens.fc2]
        mixed = y
        for layer in layers:
            mixed = normal(layer.weight) @ mixed
        y = (mixed + y) / 2
    target = y.mean(1)

    with Aligner(model).watch(mix) as seen:
        logits = model(images)
    got = seen.shares.image[:, None] * own + (1 - seen.shares.image[:, None]) * partner
    assert (got - target).abs().max() < 1e-6
    assert (seen.shares.image - mix.ratio).abs().max() > 1e-3
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
    exact = torch.autograd.grad(F.cross_entropy(model(images), target), list(model.parameters()))
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-8


def test_layers_can_be_left_out():
    model = make(ResBlock)
    images, mix = batch()
    with Aligner(model, Alignment(layers=(2,), residual=False)).watch(mix) as seen:
        model(images)
    start = mix.mask.view(B, 4, 16, 4, 16).mean((2, 4)).flatten(1)
    wanted = start @ normal(model.blocks[1].linear_tokens.weight).t()
    torch.testing.assert_close(seen.shares.grid.flatten(1), wanted, atol=1e-6, rtol=0)


def test_gating_units_are_refused():
    with pytest.raises(UnsupportedModelError, match="SpatialGatingBlock"):
        Aligner(make(SpatialGatingBlock))
