"""Pixels and tokens of the same batch (All Tokens Matter, Table 3, row 3), against mixing everything by hand."""

import pytest
import timm
import torch
from torch.nn import functional as F

from everytoken.data.batch import Batch, TeacherView
from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.mixing.guided import PuzzleMix
from everytoken.mixing.methods import Compose, CutMix, MixToken, MixUp
from everytoken.models import TokenModel
from everytoken.objectives.distillation import OnlineTokenLabeling
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.tl_align import TLAlign
from everytoken.objectives.token_labeling import TokenLabeling

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def cross_entropy(target, logits):
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


@pytest.fixture(scope="module")
def case():
    """(model, images, labels, mixed pixels, mix, view, the view of embeddings that were swapped by hand)"""
    torch.manual_seed(0)
    model = TokenModel(timm.create_model("vit_tiny_patch16_224", **VIT), 3).eval()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 1])
    mixer = build_mixer({"compose": {"mixtoken": {}, "mixup": {"alpha": 0.8}}})
    draws = (mixer(images, key=StepKey(seed), grid=(4, 4)) for seed in range(50))
    pixels, mix = next(draw for draw in draws if draw[1].tokens.ratio[0] < 0.8)
    blended = mix.mask * images.flatten(1) + (1 - mix.mask) * images.flip(0).flatten(1)
    torch.testing.assert_close(pixels, blended.view_as(images))
    places = mix.tokens.mask.view(1, 16, 1) > 0.5
    swap = model.backbone.patch_embed.register_forward_hook(lambda m, a, out: torch.where(places, out, out.flip(0)))
    by_hand = model(pixels)
    swap.remove()
    return model, images, labels, pixels, mix, model(pixels, mix), by_hand


def swapped(values, mix):
    """[4, 4, 4, ...] of pixel-mixed images, each token where the mix shows it."""
    return torch.where(mix.tokens.mask[..., None] > 0.5, values, values.flip(0))


def blended(values, mix):
    return mix.mask[0, 0, 0] * values + (1 - mix.mask[0, 0, 0]) * values.flip(0)


def test_the_network_sees_pixels_and_then_embeddings_mixed(case):
    *_, view, by_hand = case
    torch.testing.assert_close(view.logits, by_hand.logits)
    assert not torch.allclose(view.token_logits, by_hand.token_logits), "nothing was put back, so nothing is tested"


def test_the_class_label_is_mixed_twice(case):
    _, images, labels, _, mix, view, by_hand = case
    y = blended(F.one_hot(labels, 3).float(), mix)
    y = mix.tokens.ratio[:, None] * y + (1 - mix.tokens.ratio[:, None]) * y.flip(0)
    got = HardLabels(smoothing=0.0)(view, Batch(images, labels))["class"]
    torch.testing.assert_close(got, cross_entropy(y, by_hand.logits))


def test_token_labels_are_those_of_what_each_token_shows(case):
    _, images, labels, _, mix, view, by_hand = case
    dense = torch.rand(4, 4, 4, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
    none = torch.zeros(4, 4, 4)
    batch = Batch(images, labels, token_target=CompactTarget(torch.arange(3).expand(4, 3), dense, none, none + 1, 3))
    got = TokenLabeling(beta=1.0, class_term=False)(view, batch)["token"]
    torch.testing.assert_close(got, cross_entropy(swapped(blended(dense, mix), mix), by_hand.token_logits))


def test_a_teacher_that_saw_the_mixed_pixels_labels_the_swapped_tokens(case):
    _, images, labels, _, mix, view, by_hand = case
    g = torch.Generator().manual_seed(2)
    teacher = TeacherView(torch.randn(4, 3, generator=g), torch.randn(4, 4, 4, 3, generator=g))
    got = OnlineTokenLabeling(beta=1.0, class_target="teacher")(view, Batch(images, labels, teacher=teacher))
    expected = cross_entropy(swapped(teacher.token_logits.softmax(-1), mix), by_hand.token_logits)
    torch.testing.assert_close(got["token"], expected)
    label = teacher.logits.softmax(-1)
    label = mix.tokens.ratio[:, None] * label + (1 - mix.tokens.ratio[:, None]) * label.flip(0)
    torch.testing.assert_close(got["class"], cross_entropy(label, by_hand.logits))


def test_shares_start_from_both_mixes(case):
    _, images, labels, pixels, mix, *_ = case
    lam = mix.mask[0, 0, 0]
    torch.testing.assert_close(mix.at((4, 4)), torch.where(mix.tokens.mask > 0.5, lam, 1 - lam).expand(4, -1, -1))
    torch.testing.assert_close(mix.ratio, mix.at((4, 4)).mean((1, 2)))
    aligned = TokenModel(timm.create_model("vit_tiny_patch16_224", **VIT))
    objective = TLAlign(aligned, layers=(-1,))
    shares = aligned(pixels, mix).shares
    assert shares.image.min() >= min(lam, 1 - lam) - 1e-6
    assert shares.image.max() <= max(lam, 1 - lam) + 1e-6
    assert objective(aligned(pixels, mix), Batch(images, labels))["loss"] > 0


def test_a_batch_that_one_of_them_leaves_alone_is_mixed_by_the_other():
    images = torch.randn(4, 3, 32, 32)
    _, mix = Compose(MixUp(prob=0.0), MixToken())(images, grid=(4, 4))
    assert (mix.level, mix.tokens) == ("tokens", None)
    _, mix = Compose(CutMix(), MixToken(prob=0.0))(images, grid=(4, 4))
    assert (mix.level, mix.tokens) == ("pixels", None)


def test_only_pixels_and_then_tokens_compose():
    with pytest.raises(EverytokenError, match="MixUp and CutMix"):
        Compose(MixUp(), CutMix())
    with pytest.raises(EverytokenError, match="PuzzleMix and MixToken"):
        Compose(PuzzleMix(), MixToken())
    with pytest.raises(EverytokenError, match="one of tokens"):
        build_mixer({"compose": {"mixup": {}}})
    with pytest.raises(EverytokenError, match="no mixing method 'mixtokens'"):
        build_mixer({"compose": {"mixup": {}, "mixtokens": {}}})
