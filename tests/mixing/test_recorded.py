"""Mixes that other libraries made: boxes, masks, and mixers of timm and torchvision with their box given back."""

import numpy as np
import pytest
import timm
import timm.data
import torch
from torchvision.transforms import v2

import everytoken as et
from everytoken.keyed import StepKey
from everytoken.mixing.mix import apply_to_pixels
from everytoken.mixing.recorded import Recorded

B = 6


def images(count=B, size=(20, 24)):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


TIMM = {"cutmix_alpha": 1.0, "num_classes": 5, "label_smoothing": 0.0}
MIXERS = {
    "timm": timm.data.Mixup(mixup_alpha=0.8, **TIMM),
    "timm, per pair": timm.data.Mixup(mixup_alpha=0.8, mode="pair", **TIMM),
    "timm, per image": timm.data.Mixup(mixup_alpha=0.8, mode="elem", **TIMM),
    "torchvision CutMix": v2.CutMix(num_classes=5),
    "torchvision MixUp": v2.MixUp(num_classes=5),
    "torchvision, one of them": v2.RandomChoice([v2.CutMix(num_classes=5), v2.MixUp(num_classes=5)]),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_of_others_give_their_box_back(name):
    """The same draw, once by themselves and once recorded: the same pixels and the same labels."""
    labels, mixed_at_all = torch.tensor([0, 1, 2, 3, 4, 0]), 0
    for seed in range(8):
        answers = []
        for run in (
            lambda: MIXERS[name](images().clone(), labels.clone()),
            lambda: Recorded(MIXERS[name])(images(), StepKey()),
        ):
            torch.manual_seed(seed)
            np.random.seed(seed)
            answers.append(run())
        (theirs, soft), (ours, mix) = answers
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        one_hot = torch.eye(5)[labels]
        own = mix.ratio[:, None]
        torch.testing.assert_close(own * one_hot + (1 - own) * one_hot[mix.partner], soft, atol=1e-5, rtol=1e-5)
        mixed_at_all += bool((own < 0.99).any())
    assert mixed_at_all > 4


def test_a_recorded_mixer_works_where_ours_do_and_labels_follow_the_tokens():
    torch.manual_seed(0)
    model = et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=5))
    step = et.TokenStep(model, {"tl_align": et.TLAlign(model)}, Recorded(v2.CutMix(num_classes=5))).train()
    result = step(et.Batch(images(size=(32, 32)), torch.arange(B) % 5))
    result["loss"].backward()
    assert model.backbone.patch_embed.proj.weight.grad is not None


@pytest.mark.parametrize("count", [1, 3, 256])
def test_any_number_of_images_is_told_apart(count):
    mixed, mix = Recorded(v2.MixUp(num_classes=5))(x := images(count, (2, 2)))
    assert mix.partner.tolist() == [(i - 1) % count for i in range(count)]
    wanted = mix.mask[:, None] * x + (1 - mix.mask[:, None]) * x.roll(1, 0)
    torch.testing.assert_close(mixed, wanted, atol=1e-5, rtol=1e-5)


def test_mixing_of_three_images_is_refused():
    def three(x, labels):
        return (x + x.roll(1, 0) + x.roll(2, 0)) / 3, labels

    with pytest.raises(et.EverytokenError, match="one other"):
        Recorded(three)(images())


def test_a_box_that_somebody_pasted_is_a_mix():
    x, partner = images(), torch.arange(B).flip(0)
    pasted = x.clone()
    pasted[:, :, 3:9, 10:24] = x.flip(0)[:, :, 3:9, 10:24]
    mix = et.Mix.from_box((10, 3, 24, 9), partner, (20, 24))
    assert torch.equal(apply_to_pixels(x, mix), pasted)
    assert mix.ratio.tolist() == pytest.approx([1 - 14 * 6 / (20 * 24)] * B)
    boxes = torch.tensor([[0, 0, 4, 4], [10, 3, 24, 9]] * 3)
    mix = et.Mix.from_box(boxes, partner, (20, 24))
    assert torch.equal(apply_to_pixels(x, mix)[1::2], pasted[1::2])
    assert mix.ratio[0] == pytest.approx(1 - 16 / 480)


def test_a_mask_that_somebody_drew_is_a_mix():
    x, partner = images(), torch.arange(B).roll(1)
    mask = torch.rand(20, 24, generator=torch.Generator().manual_seed(1)) < 0.5
    mix = et.Mix.from_mask(mask, partner)
    assert torch.equal(apply_to_pixels(x, mix), torch.where(mask, x, x[partner]))
    assert mix.ratio.tolist() == pytest.approx([float(mask.float().mean())] * B)
    for wrong in (torch.ones(2, 20, 24), torch.ones(B, 1, 20, 24)):
        with pytest.raises(ValueError, match="does not fit 6 images"):
            et.Mix.from_mask(wrong, partner)
