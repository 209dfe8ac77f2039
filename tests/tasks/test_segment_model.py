"""Heads, parameter counts of the papers, metrics, inference."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import everytoken  # noqa: F401
from everytoken.engine.recipe import apply, header, read_recipe, recipe_names
from everytoken.errors import EverytokenError
from everytoken.tasks.backbone import Features, build_features
from everytoken.tasks.options import BackboneOptions
from everytoken.tasks.segment.infer import Inference, best_class, slide, starts
from everytoken.tasks.segment.metrics import Confusion
from everytoken.tasks.segment.model import FcnHead, Segmenter, UperHead, load_segmenter
from everytoken.tasks.segment.options import DecoderOptions, EvalOptions, SegmentOptions
from everytoken.tasks.segment.task import pixel_loss


@pytest.mark.parametrize(
    ("name", "size", "decoder", "millions"),
    [
        ("lvvit_s", 512, DecoderOptions(head="fcn"), 30),
        ("lvvit_s", 512, DecoderOptions(channels=256), 44),
        ("lvvit_m", 512, DecoderOptions(channels=256), 77),
        ("lvvit_l", 448, DecoderOptions(channels=512, aux_channels=512), 209),
        ("swin_tiny_patch4_window7_224", 512, DecoderOptions(), 60),
        ("swin_small_patch4_window7_224", 512, DecoderOptions(), 81),
        ("swin_base_patch4_window7_224", 512, DecoderOptions(), 121),
    ],
)
def test_parameters_are_those_of_the_papers_tables(name, size, decoder, millions):
    with torch.device("meta"):
        backbone = timm.create_model(name, img_size=size, num_classes=0)
        model = Segmenter(Features(backbone), decoder, 150)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("segment_")])
def test_every_recipe_builds_a_model_of_the_size_in_its_first_line(name):
    options = apply(SegmentOptions(), read_recipe(name), name)
    text = header(name)
    assert "Run by us:" in text
    assert "Source:" in text
    with torch.device("meta"):
        backbone = timm.create_model(options.model.model, img_size=options.augment.crop_size, num_classes=0)
        model = Segmenter(Features(backbone), options.decoder, 150)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert f": {millions:.0f} M parameters" in text.splitlines()[0]
    optim = options.optim
    assert optim.iters == 160_000
    assert (optim.sched, optim.lr, optim.weight_decay) == ("linear", 6e-5, 0.01)


def test_deit_s_has_58_million_with_the_neck_of_tl_align_and_fewer_with_side_layers():
    """Table 3 of TL-Align has 58 M: its levels come from a neck of one 1x1 and one 3x3 convolution (with bias) per tap,
    which interpolates; ours are the side layers of LV-ViT. The head is the same."""
    with torch.device("meta"):
        backbone = timm.create_model("deit_small_patch16_224", img_size=512, num_classes=0)
        model = Segmenter(Features(backbone), DecoderOptions(pyramid_channels=384), 150)
        neck = [torch.nn.Conv2d(384, 384, k) for k in (1, 3) for _ in range(4)]

    def count(m):
        return sum(p.numel() for p in m.parameters()) / 1e6

    ours = count(model)
    theirs = ours - count(model.pyramid) + sum(map(count, neck))
    assert round(theirs) == 58
    assert round(ours) == 56


def test_upernet_equals_a_slow_version_written_out():
    torch.manual_seed(0)
    dims = [6, 8, 10]
    head = UperHead(dims, 5, 4).eval()
    for m in head.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.1)
            m.running_var.uniform_(0.5, 1.5)
    maps = [torch.randn(2, d, s, s + 2) for d, s in zip(dims, (16, 8, 4), strict=True)]

    def up(x, size):
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)

    top = maps[2]
    pooled = []
    for cells, conv in zip((1, 2, 3, 6), head.pooled, strict=True):
        grid = torch.empty(2, 10, cells, cells)
        h, w = top.shape[2:]
        for i in range(cells):
            for j in range(cells):
                part = top[:, :, i * h // cells : -(-(i + 1) * h // cells), j * w // cells : -(-(j + 1) * w // cells)]
                grid[:, :, i, j] = part.mean((2, 3))
        pooled.append(up(conv(grid), (h, w)))
    level2 = head.bottleneck(torch.cat([top, *pooled], 1))
    level1 = head.lateral[1](maps[1]) + up(level2, maps[1].shape[2:])
    level0 = head.lateral[0](maps[0]) + up(level1, maps[0].shape[2:])
    size = maps[0].shape[2:]
    joined = torch.cat([head.smooth[0](level0), up(head.smooth[1](level1), size), up(level2, size)], 1)
    expected = head.classifier(head.fuse(joined))
    torch.testing.assert_close(head(maps), expected)


def test_fcn_looks_at_one_map_only():
    head = FcnHead([4, 6], 3, 8, convs=2, index=0).eval()
    maps = [torch.randn(1, 4, 5, 5), torch.randn(1, 6, 3, 3)]
    out = head(maps)
    assert out.shape == (1, 3, 5, 5)
    torch.testing.assert_close(head([maps[0], maps[1] * 0]), out)


def tiny(head: str = "upernet", model: str = "vit_tiny_patch16_224", **more) -> Segmenter:
    kwargs = {"patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2} if model.startswith("vit") else {}
    features, _ = build_features(BackboneOptions(model=model, model_kwargs=kwargs), 32)
    return Segmenter(features, DecoderOptions(head=head, channels=8, aux_channels=8, pyramid_channels=16, **more), 3)


@pytest.mark.parametrize("head", ["upernet", "fcn"])
@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "convnext_atto"])
def test_logits_have_the_size_of_the_image_and_all_weights_learn(head, model):
    segmenter = tiny(head, model).train()
    logits, aux = segmenter.both(torch.randn(2, 3, 45, 38))
    assert logits.shape == aux.shape == (2, 3, 45, 38)
    (pixel_loss(logits, torch.zeros(2, 45, 38)) + pixel_loss(aux, torch.zeros(2, 45, 38))).backward()
    unused = [n for n, p in segmenter.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused
    assert tiny(aux_weight=0.0).both(torch.randn(2, 3, 32, 32))[1] is None


def test_the_loss_is_the_mean_over_all_pixels_and_ignored_ones_give_none():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 3, 5, requires_grad=True)
    masks = torch.randint(0, 4, (2, 3, 5))
    masks[0, 1:] = -1
    total = 0.0
    for b in range(2):
        for y in range(3):
            for x in range(5):
                if masks[b, y, x] >= 0:
                    total += -logits[b, :, y, x].log_softmax(0)[masks[b, y, x]]
    loss = pixel_loss(logits, masks.to(torch.int16))
    torch.testing.assert_close(loss, total / 30)
    loss.backward()
    assert (logits.grad[0, :, 1:] == 0).all()
    assert pixel_loss(logits, torch.full((2, 3, 5), -1)) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_metrics_equal_counting_pixel_by_pixel(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 6))
    counts = Confusion(k)
    pairs = []
    for _ in range(3):
        truth, found = rng.integers(-1, k - 1, (4, 5)), rng.integers(0, k, (4, 5))
        counts.add(torch.from_numpy(truth), torch.from_numpy(found))
        pairs += [(t, f) for t, f in zip(truth.ravel(), found.ravel(), strict=True) if t >= 0]
    iou, accuracy = [], []
    for c in range(k):
        union = sum(t == c or f == c for t, f in pairs)
        mine = sum(t == c for t, f in pairs)
        both = sum(t == c and f == c for t, f in pairs)
        if union:
            iou.append(both / union)
        if mine:
            accuracy.append(both / mine)
    numbers = counts.summary()
    if pairs:
        assert numbers["mIoU"] == pytest.approx(100 * np.mean(iou))
        assert numbers["mAcc"] == pytest.approx(100 * np.mean(accuracy))
        assert numbers["aAcc"] == pytest.approx(100 * np.mean([t == f for t, f in pairs]))
    assert len(counts.per_class([str(c) for c in range(k)])) == len(iou)


def test_the_confusion_matrix_is_one_for_the_whole_set_and_names_what_is_taken_for_what():
    counts = Confusion(3)
    counts.add(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]))
    counts.add(torch.tensor([0]), torch.tensor([0]))
    rows = counts.per_class(["sky", "sea", "sun"])
    assert [row["class"] for row in rows] == ["sky", "sea"]  # the sun does not occur
    assert rows[0] == {"class": "sky", "IoU": pytest.approx(200 / 3), "accuracy": pytest.approx(200 / 3),
                       "pixels": 60.0, "taken for": "sea"}  # fmt: skip
    assert rows[1]["taken for"] == ""
    counts.add(torch.tensor([0]), torch.tensor([2]))
    assert counts.per_class(["sky", "sea", "sun"])[2]["accuracy"] is None  # as in JSON, which has no NaN


@pytest.mark.parametrize(
    ("length", "window", "stride", "expected"),
    [(10, 4, 3, [0, 3, 6]), (11, 4, 3, [0, 3, 6, 7]), (4, 4, 3, [0]), (3, 4, 3, [0]), (512, 512, 341, [0]),
     (683, 512, 341, [0, 171]), (1024, 512, 341, [0, 341, 512])],
)  # fmt: skip
def test_windows_cover_everything_and_end_at_the_end(length, window, stride, expected):
    assert starts(length, window, stride) == expected


def test_sliding_averages_the_logits_of_windows():
    def network(x):  # depends on what the window shows, so overlapping windows disagree
        return torch.cat([x[:, :1] + x.mean((1, 2, 3), keepdim=True), x[:, 1:2]], 1)

    image = torch.randn(1, 3, 9, 14)
    out = slide(network, image, 5, 3)
    expected, count = torch.zeros(2, 9, 14), torch.zeros(9, 14)
    for y in (0, 3, 4):
        for x in (0, 3, 6, 9):
            expected[:, y : y + 5, x : x + 5] += network(image[..., y : y + 5, x : x + 5])[0]
            count[y : y + 5, x : x + 5] += 1
    torch.testing.assert_close(out[0], expected / count)
    sizes = []
    slide(lambda x: sizes.append(x.shape[-2:]) or x, image[..., :4, :], 5, 3, fixed=True)
    assert set(sizes) == {torch.Size([5, 5])}


def ask(network, **options) -> Inference:
    return Inference(network, 16, 16, (0.0,) * 3, (1 / 255,) * 3, EvalOptions(**options))


def test_scales_and_mirrors_are_averaged_as_probabilities():
    seen = []

    def network(x):
        seen.append(tuple(x.shape[-2:]))
        return torch.cat([x[:, :1], x[:, 1:2].flip(-1)], 1) / 50  # not symmetric

    image = torch.randint(0, 256, (1, 3, 16, 20), dtype=torch.uint8)
    scores = ask(network, scales=(1.0, 2.0), flip=True).scores(image)
    assert seen == [(16, 20)] * 2 + [(32, 40)] * 2
    total = 0
    for scale in (1, 2):
        x = image.float()
        if scale == 2:
            x = F.interpolate(x, (32, 40), mode="bilinear", antialias=True).round().clamp(0, 255)
        for y in (network(x), network(x.flip(-1)).flip(-1)):
            total = total + F.interpolate(y, (16, 20), mode="bilinear", align_corners=False).softmax(1)
    torch.testing.assert_close(scores, total)
    single = ask(network).scores(image)
    torch.testing.assert_close(single, network(image.float()))


def test_answers_have_the_size_of_the_image_and_chunks_do_not_change_them(monkeypatch):
    scores = torch.randn(1, 7, 5, 6)
    expected = F.interpolate(scores, (23, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    assert torch.equal(best_class(scores, (23, 31)), expected)
    monkeypatch.setattr("everytoken.tasks.segment.infer._CHUNK", 23 * 31 * 2)
    assert torch.equal(best_class(scores, (23, 31)), expected)
    answer = ask(lambda x: x)(torch.zeros(1, 3, 40, 90, dtype=torch.uint8))
    assert answer.shape == (40, 90)


def test_a_file_that_is_no_segmenter_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(EverytokenError, match=r"x\.safetensors is not a segmenter.*token"):
        load_segmenter(tmp_path / "x.safetensors")
