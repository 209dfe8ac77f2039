"""What mixers that look at images are shown, and training with every mixer."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.keyed import StepKey
from everytoken.mixing import MIXERS, build_mixer
from everytoken.mixing.guided import guide_for, importance, importance_by_gradient
from everytoken.mixing.methods import Compose, CutMix, MixToken, MixUp, OneOf
from everytoken.models import TokenModel
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher, TokenStep

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
NORM = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def vit(**more) -> TokenModel:
    torch.manual_seed(0)
    return TokenModel(timm.create_model("vit_tiny_patch16_224", **{**VIT, **more}))


def resnet() -> TokenModel:
    torch.manual_seed(0)
    return TokenModel(timm.create_model("test_resnet", num_classes=4))


def batch(n=4):
    g = torch.Generator().manual_seed(1)
    return Batch(torch.randn(n, 3, 32, 32, generator=g), torch.randint(0, 4, (n,), generator=g))


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("objectives", [{"hard": {}}, {"tl_align": {}}, {"transmix": {}}, {"drloc": {}}])
def test_every_mixer_trains_with_every_way_of_labels(name, objectives):
    model = vit()
    fields = {"blocks": (4,)} if name == "puzzlemix" else {}
    step = TokenStep(model, build_objectives(objectives, model), build_mixer({name: fields})).train()
    terms = step(replace(batch(), key=StepKey(1, 5)))
    terms["loss"].backward()
    assert torch.isfinite(terms["loss"])
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_guide_leaves_the_network_as_it_was():
    model = resnet().train()
    model.backbone.get_submodule("layer1").eval()  # a mixed state
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    for kind in ("saliency", "attention", "gradient"):
        assert guide_for(model, batch().images, batch().labels)(kind).min() >= 0
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_gradient_guide_is_the_size_of_the_loss_gradient():
    model, data = vit().eval(), batch()
    pixels = data.images.clone().requires_grad_()
    for i in range(len(data)):
        loss = torch.nn.functional.cross_entropy(model(pixels[i : i + 1]).logits, data.labels[i : i + 1])
        loss.backward()
    torch.testing.assert_close(importance_by_gradient(model, data.images, data.labels), pixels.grad.norm(dim=1))


def test_the_attention_guide_of_a_pooled_network_is_its_class_map():
    model, images = resnet().eval(), batch().images.repeat(1, 1, 2, 2)
    cells = model.cell_logits(images)
    for i, first in enumerate(model(images).logits.argmax(-1).tolist()):
        expected = cells[i, ..., first] - cells[i, ..., first].min()
        torch.testing.assert_close(importance(model, images)[i], expected)


def test_the_teacher_is_asked_where_there_is_one():
    student, teacher = vit(), FrozenTeacher(vit(depth=1), NORM, ((0.4, 0.4, 0.4), (0.2, 0.2, 0.2)))
    data = batch(2)
    mixer = build_mixer({"attentivecutmix": {"side": 2, "cells": 1}})
    step = TokenStep(student, build_objectives({"hard": {}}, student), mixer, teacher).train()
    mix = step.mixed(replace(data, key=StepKey(0, 0))).mix
    seen = importance(teacher.model, (data.images * 0.5 + 0.5 - 0.4) / 0.2)
    coarse = torch.nn.functional.avg_pool2d(seen, 2)
    asked = importance(student.eval(), data.images)
    assert seen.flatten(1).argmax(1).tolist() != asked.flatten(1).argmax(1).tolist()
    assert [int(m[::16, ::16].flatten().argmin()) for m in mix.mask] == coarse.flatten(1).argmax(1).flip(0).tolist()


def test_puzzle_mix_without_labels_is_refused():
    model = vit()
    step = TokenStep(model, build_objectives({"hard": {}}, model), build_mixer({"puzzlemix": {}})).train()
    with pytest.raises(EverytokenError, match="no labels"):
        step(replace(Batch(batch().images), key=StepKey(0, 0)))


def test_the_snippet_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "mixing.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S).group(1)
    images = torch.rand(4, 3, 32, 32)
    names = {"model": vit(), "images": images, "labels": torch.arange(4)}
    exec(code.replace("grid=(14, 14)", "grid=(4, 4)"), names)
    assert names["mixed"].shape == images.shape
    assert names["mix"].level == "tokens"
    assert names["images"] is images


def test_a_mixer_repeats_with_its_key_and_leaves_images_alone_that_it_does_not_mix():
    images = torch.rand(4, 3, 32, 32)
    (first, _), (again, _), (other, _) = (CutMix()(images, StepKey(1, step)) for step in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    same, mix = CutMix(prob=0)(images)
    assert torch.equal(same, images)
    assert mix.ratio.tolist() == [1, 1, 1, 1]
    torch.manual_seed(0)
    seeded = CutMix()(images)[0]
    torch.manual_seed(0)
    assert torch.equal(CutMix()(images)[0], seeded)


def test_mixers_that_draw_on_the_token_grid_ask_for_it_and_others_do_not():
    """A guess would be boxes of 2x2 tokens on a grid of 8x8."""
    images = torch.rand(4, 3, 32, 32)
    guide = guide_for(vit(), images, torch.arange(4))
    asking = {"mixtoken", "random", "block", "tokenmix"}
    mixers = [(kind(), name in asking) for name, kind in MIXERS.items()]
    mixers += [(CutMix(patches=True), True), (OneOf([CutMix(), MixToken()]), True), (OneOf([CutMix(), MixUp()]), False)]
    for mixer, asks in [*mixers, (Compose(MixUp(), MixToken()), True)]:
        mixer(images, grid=(4, 4), guide=guide)
        if asks:
            with pytest.raises(ValueError, match="token grid"):
                mixer(images, guide=guide)
        else:
            assert mixer.draw(4, (32, 32), None, np.random.default_rng(0), guide=guide) is not None
