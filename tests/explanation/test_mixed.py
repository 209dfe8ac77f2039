"""Two images mixed: shares, layer by layer, and how far they leave the area."""

import numpy as np
import pytest
import timm
import torch

from everytoken.models import TokenModel
from everytoken_lab.explanation.cards import draw_box, follow_mix
from everytoken_lab.explanation.saliency import record_attention

from .conftest import tiny_vit


def two(size=32):
    return torch.randn(2, 1, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("part", [0.1, 0.4, 0.9])
def test_a_box_has_the_part_that_was_asked_for(part):
    mask = draw_box(part, (64, 96), seed=3)
    assert mask.shape == (1, 64, 96)
    assert abs(1 - mask.mean() - part) < 0.02
    rows, columns = np.nonzero(mask[0].numpy() == 0)
    assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)


def test_shares_of_a_vit_are_followed_by_hand():
    torch.manual_seed(0)
    model = TokenModel(tiny_vit(depth=2)).eval()
    own, partner = two()
    mask = draw_box(0.4, (32, 32))
    story = follow_mix(model, own, partner, mask)
    mixed = own * mask + partner * (1 - mask)
    with torch.no_grad(), record_attention(model.backbone) as matrices:
        model.backbone(mixed)
    start = mask.view(8, 4, 8, 4).mean((1, 3)).flatten()
    shares = torch.cat((mask.mean().view(1), start))
    expected = [shares[0].item()]
    for matrix in matrices:
        shares = (matrix[0].mean(0) @ shares + shares) / 2
        expected.append(shares[0].item())
    np.testing.assert_allclose(story.layers, expected, rtol=1e-4)
    assert story.share == pytest.approx(expected[-1], rel=1e-4)
    torch.testing.assert_close(story.aligned.flatten(), shares[1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(story.start.flatten(), start)


@pytest.mark.parametrize(
    ("name", "arguments", "points"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "depths": (1, 1, 1, 1)}, 5),
        ("cait_xxs24_224", {"img_size": 64, "depth": 2}, 5),
        ("deit_tiny_distilled_patch16_224", {"img_size": 64, "depth": 2}, 3),
        ("resnet18", {}, 9),
    ],
)
def test_every_kind_of_backbone_tells_its_story_and_keeps_nothing_of_it(name, arguments, points):
    torch.manual_seed(0)
    model = TokenModel(timm.create_model(name, num_classes=3, **arguments)).eval()
    own, partner = two(64)
    with torch.no_grad():
        before = model(own).logits
    story = follow_mix(model, own, partner, draw_box(0.4, (64, 64)))
    assert len(story.layers) == points
    assert story.layers[0] == pytest.approx(story.ratio)
    assert story.layers[-1] == pytest.approx(story.share, abs=1e-5)
    assert 0 <= story.aligned.min() <= story.aligned.max() <= 1
    assert not any(m._forward_hooks for m in model.backbone.modules())
    with torch.no_grad():
        assert torch.equal(model(own).logits, before)
