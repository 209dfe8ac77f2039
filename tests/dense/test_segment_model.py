"""Heads, parameter counts of the papers, metrics, inference, released files."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

import everytoken  # noqa: F401
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken_lab.cli import main
from everytoken_lab.dense.backbone import Features, build_features
from everytoken_lab.dense.segment import NEW_RUN, DecoderOptions, EvalOptions, SegmentOptions
from everytoken_lab.dense.segment.model import (
    LVVIT,
    FcnHead,
    InterpolatedLevels,
    Segmenter,
    SegmenterInfo,
    UperHead,
    load_segmenter,
    pixel_loss,
)
from everytoken_lab.dense.segment.task import Inference, SegmentScore, best_class, slide, starts
from everytoken_lab.engine.options import BackboneOptions, apply, header, read_recipe, recipe_names
from everytoken_lab.models.description import Description

from .conftest import make_shapes


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


def test_deit_s_has_the_parameters_and_multiplications_of_tl_aligns_table_3():
    """58 M, and 1032 G at 512 x 2048 as mmcv counts them: without attention, whose module it does not look into."""
    with torch.device("meta"):
        backbone = timm.create_model("deit_small_patch16_224", img_size=(512, 2048), num_classes=0)
        model = Segmenter(Features(backbone), DecoderOptions(neck="interpolated"), 150).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 512, 2048))
    parameters = sum(p.numel() for p in model.parameters()) - (32 * 128 - 32 * 32) * 384  # positions of 512 x 512
    assert parameters == 57_995_180
    counts = {str(name): value / 2e9 for name, value in counter.get_flop_counts()["Global"].items()}
    projections = 12 * (32 * 128 + 1) * 4 * 384**2 / 1e9  # queries, keys, values and their output
    assert round(sum(counts.values())) == 1216
    assert round(sum(counts.values()) - counts["aten.bmm"] - projections) == 1032


def test_the_interpolated_neck_equals_a_slow_version():
    torch.manual_seed(0)
    neck = InterpolatedLevels([4] * 4)
    maps = [torch.randn(2, 4, 6, 8) for _ in range(4)]
    for k, (level, scale) in enumerate(zip(neck(maps), (4, 2, 1, 0.5), strict=True)):
        grid = torch.einsum("oc,bchw->bohw", neck.lateral[k].weight[:, :, 0, 0], maps[k])
        grid = F.interpolate(grid, scale_factor=scale, mode="bilinear", align_corners=False)
        torch.testing.assert_close(level, F.conv2d(grid, neck.convs[k].weight, padding=1), atol=1e-5, rtol=1e-4)
    limit = (6 / (4 * 9 * 2)) ** 0.5
    assert float(neck.convs[0].weight.detach().abs().max()) == pytest.approx(limit, rel=0.1)


def test_convolutions_start_as_mmcvs():
    head = UperHead([16, 24], 5, 64)
    for conv, fan_out in (
        (head.fuse[0], 64 * 9),
        (head.lateral[0][0], 64),
        (FcnHead([16], 3, 64, 1, 0.1).convs[0][0], 64 * 9),
    ):
        assert float(conv.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
    assert float(head.classifier[1].weight.detach().std()) == pytest.approx(0.01, rel=0.2)


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


def tiny(head: str = "upernet", model: str = "vit_tiny_patch16_224", **more) -> Segmenter:
    kwargs = {"patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2} if model.startswith("vit") else {}
    features, _ = build_features(BackboneOptions(model=model, model_kwargs=kwargs), 32)
    return Segmenter(features, DecoderOptions(head=head, channels=8, aux_channels=8, pyramid_channels=16, **more), 3)


@pytest.mark.parametrize("head", ["upernet", "fcn"])
@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "convnext_atto"])
def test_logits_have_the_size_of_the_image_and_all_weights_learn(head, model):
    segmenter = tiny(head, model).train()
    images, masks = torch.randn(2, 3, 45, 38), torch.zeros(2, 45, 38)
    assert segmenter(images).shape == (2, 3, 45, 38)
    terms = segmenter.losses(images, masks)
    torch.testing.assert_close(terms["loss"], terms["pixels"] + 0.4 * terms["aux"])
    terms["loss"].backward()
    unused = [n for n, p in segmenter.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused
    assert "aux" not in tiny(head, model, aux_weight=0.0).losses(images, masks)


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
    counts = SegmentScore([str(c) for c in range(k)])
    pairs = []
    for _ in range(3):
        truth, found = rng.integers(-1, k - 1, (4, 5)), rng.integers(0, k, (4, 5))
        counts.count(torch.from_numpy(truth), torch.from_numpy(found))
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
    numbers, rows = counts.result()
    if pairs:
        assert numbers["mIoU"] == pytest.approx(100 * np.mean(iou))
        assert numbers["mAcc"] == pytest.approx(100 * np.mean(accuracy))
        assert numbers["aAcc"] == pytest.approx(100 * np.mean([t == f for t, f in pairs]))
    assert len(rows) == len(iou)


def test_the_confusion_matrix_is_one_for_the_whole_set_and_names_what_is_taken_for_what():
    counts = SegmentScore(["sky", "sea", "sun"])
    counts.count(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]))
    counts.count(torch.tensor([0]), torch.tensor([0]))
    _, rows = counts.result()
    assert [row["class"] for row in rows] == ["sky", "sea"]  # the sun does not occur
    assert rows[0] == {"class": "sky", "IoU": pytest.approx(200 / 3), "accuracy": pytest.approx(200 / 3),
                       "pixels": 60.0, "taken for": "sea"}  # fmt: skip
    assert rows[1]["taken for"] == ""
    counts.count(torch.tensor([0]), torch.tensor([2]))
    assert counts.result()[1][2]["accuracy"] is None  # as in JSON, which has no NaN


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
    slide(lambda x: sizes.append(x.shape[-2:]) or x, image[..., :4, :], 5, 3)
    assert set(sizes) == {torch.Size([4, 5])}


def ask(network, **options) -> Inference:
    backbone = Description("", {}, img_size=(16, 16), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    options = EvalOptions(**{**NEW_RUN, **options})
    return Inference(network, SegmenterInfo(backbone, (), DecoderOptions(), options), options)


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
    monkeypatch.setattr("everytoken_lab.dense.segment.task._CHUNK", 23 * 31 * 2)
    assert torch.equal(best_class(scores, (23, 31)), expected)
    answer = ask(torch.nn.Conv2d(3, 4, 1))(Batch(torch.zeros(1, 3, 40, 90, dtype=torch.uint8)))
    assert answer.shape == (40, 90)


# -- released segmenters ----------------------------------------------------------------------------------------------


class ReleasedBlock(torch.nn.Module):
    """A block as the released code has it, with its names."""

    def __init__(self, dim, heads, divisor):
        super().__init__()
        self.heads, self.divisor = heads, divisor
        self.norm1, self.norm2 = (torch.nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.attn = torch.nn.ModuleDict(
            {"qkv": torch.nn.Linear(dim, 3 * dim, bias=False), "proj": torch.nn.Linear(dim, dim)}
        )
        self.mlp = torch.nn.ModuleDict({"fc1": torch.nn.Linear(dim, 3 * dim), "fc2": torch.nn.Linear(3 * dim, dim)})

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.attn["qkv"](self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).softmax(-1) @ v
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(b, n, d)) / self.divisor
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))) / self.divisor


def conv_bn(dim, out, kernel=1):
    return torch.nn.ModuleDict(
        {"conv": torch.nn.Conv2d(dim, out, kernel, padding=kernel // 2, bias=False), "bn": torch.nn.BatchNorm2d(out)}
    )


def run_conv_bn(module, x):
    return module["bn"](module["conv"](x)).relu()


class Released(torch.nn.Module):
    """upernet_lvvit_*.pth of the release, written out: names and computation of mmseg 0.x and the released backbone."""

    def __init__(self, dim, depth, heads, stem, divisor, positions, channels, aux, classes=150, last=2048):
        super().__init__()
        nn = torch.nn
        self.taps = [depth - 10, depth - 7, depth - 4, depth - 1]
        backbone = self.backbone = nn.Module()
        backbone.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        backbone.pos_embed = nn.Parameter(torch.randn(1, positions**2 + 1, dim) * 0.1)
        embed = backbone.patch_embed = nn.Module()
        for k, kernel in ((1, 7), (2, 3), (3, 3)):
            conv = nn.Conv2d(3 if k == 1 else stem, stem, kernel, 2 if k == 1 else 1, kernel // 2, bias=False)
            embed.add_module(f"conv{k}", conv)
            embed.add_module(f"bn{k}", nn.BatchNorm2d(stem))
        embed.proj = nn.Conv2d(stem, dim, 8, 8)
        backbone.blocks = nn.ModuleList([ReleasedBlock(dim, heads, divisor) for _ in range(depth)])
        for k, (out, finer) in enumerate(((dim, 4), (dim, 2), (dim, 1), (last, 1)), 1):
            up = [nn.ConvTranspose2d(dim, dim, finer, finer, bias=False), nn.BatchNorm2d(dim), nn.ReLU()]
            side = [nn.Conv2d(dim, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            backbone.add_module(f"side_layer{k}", nn.Sequential(*(up if finer > 1 else ()), *side))
        head = self.decode_head = nn.Module()
        head.conv_seg = nn.Conv2d(channels, classes, 1)
        head.psp_modules = nn.ModuleList([nn.ModuleList([nn.Identity(), conv_bn(last, channels)]) for _ in range(4)])
        head.bottleneck = conv_bn(last + 4 * channels, channels, 3)
        head.lateral_convs = nn.ModuleList([conv_bn(dim, channels) for _ in range(3)])
        head.fpn_convs = nn.ModuleList([conv_bn(channels, channels, 3) for _ in range(3)])
        head.fpn_bottleneck = conv_bn(4 * channels, channels, 3)
        self.auxiliary_head = nn.Module()
        self.auxiliary_head.conv_seg = nn.Conv2d(aux, classes, 1)
        self.auxiliary_head.convs = nn.ModuleList([conv_bn(dim, aux, 3)])

    def forward(self, images):
        embed, backbone, head = self.backbone.patch_embed, self.backbone, self.decode_head
        x = images
        for k in (1, 2, 3):
            x = getattr(embed, f"bn{k}")(getattr(embed, f"conv{k}")(x)).relu()
        x = embed.proj(x)
        h, w = x.shape[2:]
        side = int((backbone.pos_embed.shape[1] - 1) ** 0.5)
        table = backbone.pos_embed[:, 1:].transpose(1, 2).reshape(1, -1, side, side)
        table = F.interpolate(table, (h, w), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
        tokens = x.flatten(2).transpose(1, 2) + table
        tokens = torch.cat([(backbone.cls_token + backbone.pos_embed[:, :1]).expand(len(x), -1, -1), tokens], 1)
        maps = []
        for k, block in enumerate(backbone.blocks):
            tokens = block(tokens)
            if k in self.taps:
                grid = tokens[:, 1:].transpose(1, 2).reshape(len(x), -1, h, w)
                maps.append(getattr(backbone, f"side_layer{len(maps) + 1}")(grid))

        def up(grid, size):
            return F.interpolate(grid, size=size, mode="bilinear", align_corners=False)

        top = maps[3]
        pooled = [
            up(run_conv_bn(psp[1], F.adaptive_avg_pool2d(top, cells)), top.shape[2:])
            for psp, cells in zip(head.psp_modules, (1, 2, 3, 6), strict=True)
        ]
        levels = [run_conv_bn(conv, grid) for conv, grid in zip(head.lateral_convs, maps[:3], strict=True)]
        levels.append(run_conv_bn(head.bottleneck, torch.cat([top, *pooled], 1)))
        for k in (3, 2, 1):
            levels[k - 1] = levels[k - 1] + up(levels[k], levels[k - 1].shape[2:])
        out = [run_conv_bn(conv, grid) for conv, grid in zip(head.fpn_convs, levels[:3], strict=True)] + levels[3:]
        out = run_conv_bn(head.fpn_bottleneck, torch.cat([up(grid, out[0].shape[2:]) for grid in out], 1))
        return up(head.conv_seg(out), images.shape[2:])


@pytest.fixture
def write_released(tmp_path, monkeypatch):
    """Write a small network in the form of the released files; LV-ViT is as narrow while the test runs."""

    def write(name: str, **changes) -> tuple[Released, Path]:
        torch.manual_seed(0)
        depth, divisor, positions = {"s": (16, 2, 32), "l": (24, 1, 28)}[name]
        architecture, arguments = LVVIT[depth]
        narrow = {"embed_dim": 12, "num_heads": 2, "stem_width": 4}
        monkeypatch.setitem(LVVIT, depth, (architecture, {**arguments, **narrow}))
        model = Released(12, depth, 2, 4, divisor, positions, 8, 6, classes=3, last=16).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        content = {"meta": {"CLASSES": ["ground", "disc ", "square"], "iter": 160000}, "state_dict": model.state_dict()}
        content["state_dict"] |= changes
        torch.save(content, tmp_path / f"upernet_lvvit_{name}.pth")
        return model, tmp_path / f"upernet_lvvit_{name}.pth"

    return write


@pytest.mark.parametrize("name", ["s", "l"])
def test_released_segmenters_answer_as_the_released_code(name, write_released, caplog):
    released, path = write_released(name, **{"decode_head.extra.weight": torch.zeros(1)})
    model, info = load_segmenter(path)
    assert "decode_head.extra.weight" in caplog.text or "head.extra.weight" in caplog.text  # left out, and named
    images = torch.randn(1, 3, 512, 512)
    with torch.no_grad():
        torch.testing.assert_close(model(images), released(images), rtol=1e-4, atol=1e-4)
    assert info.class_names == ("ground", "disc", "square")
    assert info.evaluation == EvalOptions("slide", 341, (1.0,), False, (0.75, 1.0, 1.25, 1.5, 1.75))
    assert info.backbone.img_size == (512, 512)


def test_a_released_segmenter_is_evaluated_and_gives_its_backbone_from_the_command_line(
    write_released, tmp_path, capsys
):
    released, path = write_released("s")
    shapes = make_shapes(tmp_path / "shapes", train=2, val=1)
    (shapes / "classes.txt").write_text("soil\nball\nbox\n")  # other words for the same classes
    assert main(["segment", "eval", str(path), str(shapes), "--device", "cpu", "-j", "0", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["images"] == 1
    assert "in their order" in said.err
    kwargs = {"embed_dim": 12, "num_heads": 2, "stem_width": 4}
    options = BackboneOptions(model="lvvit_s", weights=str(path), model_kwargs=kwargs)
    features, _ = build_features(options, 64)
    assert torch.equal(features.backbone.blocks[3].mlp.fc1.weight, released.backbone.blocks[3].mlp["fc1"].weight)
    state = torch.load(path)["state_dict"]
    del state["decode_head.bottleneck.bn.weight"]
    torch.save(state, path)
    with pytest.raises(EverytokenError, match=r"head\.bottleneck\.1\.weight"):
        load_segmenter(path)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(EverytokenError, match=r"upernet_lvvit_s\.pth is not"):
        load_segmenter(path)
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(EverytokenError, match=r"x\.safetensors is not a segmenter.*--weights"):
        load_segmenter(tmp_path / "x.safetensors")
