"""Alignment through convolution and pooling, against K-wide labels that are carried place by place."""

from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models.convnext import ConvNeXt
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment
from everytoken.models.families import UnsupportedModelError

B, K = 2, 4


def batch(size=(32, 48)):
    images = torch.randn(B, 3, *size, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, *size)
    mask[0, 7:26, 15:46] = 0
    mask[1, :, 24:] = 0
    return images, SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]))


def places(y, kernel, stride, padding, dilation=1, out=None):
    """Norm(T(kernel))·Y for labels [B, h, w, K], one output place at a time."""
    _, h, w, _ = y.shape
    k = kernel.shape[0]
    rows = out[0] if out else (h + 2 * padding - dilation * (k - 1) - 1) // stride + 1
    columns = out[1] if out else (w + 2 * padding - dilation * (k - 1) - 1) // stride + 1
    new = torch.zeros(y.shape[0], rows, columns, y.shape[3])
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            for a in range(k):
                for b in range(k):
                    u, v = i * stride + a * dilation - padding, j * stride + b * dilation - padding
                    if 0 <= u < h and 0 <= v < w:
                        new[:, i, j] += kernel[a, b] * y[:, u, v]
                        total += kernel[a, b]
            new[:, i, j] /= total
    return new


def kernel(conv):
    each = conv.weight.detach().abs().sum(1)
    return (each / each.sum((1, 2), keepdim=True)).mean(0)


def conv_labels(y, conv):
    k, s = conv.kernel_size[0], conv.stride[0]
    if k == s and not conv.padding[0]:
        return places(y, torch.ones(k, k), s, 0) if k > 1 else y
    return places(y, kernel(conv), s, conv.padding[0], conv.dilation[0])


def resnet_labels(model, y):
    y = conv_labels(y, model.conv1)
    y = places(y, torch.ones(3, 3), 2, 1)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            branch = shortcut = y
            for conv in [getattr(block, f"conv{i}") for i in (1, 2, 3) if hasattr(block, f"conv{i}")]:
                branch = conv_labels(branch, conv)
            for layer in block.downsample or ():
                if isinstance(layer, nn.Conv2d):
                    shortcut = conv_labels(shortcut, layer)
                elif isinstance(layer, nn.AvgPool2d):
                    half = (-(-shortcut.shape[1] // 2), -(-shortcut.shape[2] // 2))
                    shortcut = places(shortcut, torch.ones(2, 2), 2, 0, out=half)
            y = (branch + shortcut) / 2
    return y


def convnext_labels(model, y):
    y = conv_labels(y, model.stem[0])
    for stage in model.stages:
        if len(list(stage.downsample.children())):
            y = conv_labels(y, stage.downsample[1])
        for block in stage.blocks:
            y = (conv_labels(y, block.conv_dw) + y) / 2
    return y


def resnet(block, **more):
    return ResNet(block, [1, 2, 1, 1], channels=(8, 8, 12, 12), num_classes=K, **more)


CASES = {
    "resnet": (lambda: resnet(BasicBlock), resnet_labels),
    "bottleneck, dilated, average down": (lambda: resnet(Bottleneck, avg_down=True, output_stride=16), resnet_labels),
    "convnext": (lambda: ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 8, 12, 12), num_classes=K), convnext_labels),
}


@pytest.mark.parametrize("case", CASES)
def test_targets_and_gradients_equal_labels_carried_place_by_place(case):
    torch.manual_seed(0)
    build, carry = CASES[case]
    model = build().train()
    images, mix = batch()
    labels = torch.tensor([2, 1])
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = mix.mask[..., None]
    everywhere = carry(model, r * own[:, None, None] + (1 - r) * partner[:, None, None])
    target = everywhere.mean((1, 2))

    with Aligner(model).watch(mix) as seen:
        logits = model(images)
    assert logits.shape == (B, K)
    r = seen.shares.grid[..., None]
    assert (r * own[:, None, None] + (1 - r) * partner[:, None, None] - everywhere).abs().max() < 1e-5
    r = seen.shares.image[:, None]
    assert (r * own + (1 - r) * partner - target).abs().max() < 1e-6

    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
    model.train()
    exact = torch.autograd.grad(F.cross_entropy(model(images), target), list(model.parameters()))
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


NAMES = (
    "seresnext26d_32x4d regnety_002 tf_efficientnet_lite0 test_efficientnet mobilenetv3_small_050 "
    "mobilenetv4_conv_small_035 convnextv2_atto"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_the_share_map_has_the_shape_of_the_features(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=K).train()
    images, mix = batch((65, 96))
    with Aligner(model).watch(mix) as seen:
        features = model.forward_features(images)
    assert seen.shares.grid.shape == (B, *features.shape[-2:])
    assert seen.shares.grid.min() >= 0
    assert seen.shares.grid.max() <= 1


def test_images_that_are_whole_stay_whole_whatever_the_padding():
    torch.manual_seed(0)
    model = resnet(BasicBlock)
    images, mix = batch((47, 33))
    mix.mask, mix.ratio = torch.ones(B, 1, 1), torch.ones(B)
    with Aligner(model).watch(mix) as seen:
        model(images)
    torch.testing.assert_close(seen.shares.image, torch.ones(B))
    torch.testing.assert_close(seen.shares.grid, torch.ones_like(seen.shares.grid))


def test_unknown_layers_and_wishes_are_refused():
    with pytest.raises(UnsupportedModelError, match="BlurPool2d"):
        Aligner(timm.create_model("resnetblur50"))
    with pytest.raises(EverytokenError, match="no token-mixing layers"):
        Aligner(resnet(BasicBlock), Alignment(layers=(1,)))
    with pytest.raises(UnsupportedModelError, match="alignment"):
        Aligner(timm.create_model("densenet121"))
    model = resnet(BasicBlock)
    aligner = Aligner(model)
    with pytest.raises(EverytokenError, match="has not run"), aligner.watch(batch()[1]):
        pass
