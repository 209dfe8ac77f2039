"""The token model over many timm families: orientation, logits, gradients, state dicts, mixing."""

import copy
import functools
from dataclasses import replace

import pytest
import timm
import torch
from timm.models import model_entrypoint

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Mix
from everytoken.models import FAMILIES, TokenModel, UnsupportedModelError, family_of_name, grid_shape, probe

SWIN = {"img_size": 128, "window_size": 4, "depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 4, 8)}
VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
AT_64, AT_128, AT_224 = ({"img_size": size} for size in (64, 128, 224))
AS_IT_IS: dict = {}
VITS = [
    *("lvvit_t", "vit_tiny_patch16_224", "vit_medium_patch16_gap_240", "vit_medium_patch16_reg4_gap_256"),
    *("vit_base_patch16_siglip_224", "vit_relpos_small_patch16_224", "deit_tiny_patch16_224", "vit_tiny_r_s16_p8_224"),
    *("deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "cait_xxs24_224"),
]
CNNS = [  # and others that are small or take no such arguments
    *("convnext_atto", "convnextv2_atto", "resnet18", "resnet26", "resnest14d", "nf_resnet26", "xception41p"),
    *("efficientnet_b0", "tf_efficientnet_lite0", "mobilenetv3_small_100", "regnetx_002", "regnety_002"),
    *("test_byobnet", "mobilevit_xxs", "poolformer_s12", "pvt_v2_b0", "focalnet_tiny_srf", "edgenext_xx_small"),
    *("test_mambaout", "fastvit_t8", "repvit_m0_9", "efficientvit_b0", "convmixer_768_32"),
    *("cs3darknet_focus_s", "dla46_c", "hrnet_w18_small", "ese_vovnet19b_slim", "ghostnet_050", "hgnet_tiny"),
    *("rexnet_100", "skresnet18", "hardcorenas_a", "legacy_seresnet18", "cpubone_nano", "csatv2"),
    *("cspnext_tiny", "fasternet_t0", "iformer_t", "inception_resnet_v2", "inception_v3", "inception_v4"),
    *("lcnetv2_small", "lowformer_b0", "nasnetalarge", "nextvit_small", "pnasnet5large", "rdnet_tiny"),
    *("repghostnet_050", "selecsls42", "shvit_s1", "starnet_s050", "swiftformer_xs", "legacy_xception", "vgg11"),
]
# name -> arguments that make it small
SWEEP: dict[str, dict] = {
    **dict.fromkeys(VITS, VIT),
    **dict.fromkeys(CNNS, AS_IT_IS),
    **dict.fromkeys(["volo_d1_224", "mixer_s16_224", "resmlp_12_224", "gmlp_ti16_224"], AT_64),
    **dict.fromkeys(["mvitv2_tiny", "test_maxvit", "vitamin_small_224", "gcvit_xxtiny", "botnet26t_256"], AT_128),
    **dict.fromkeys(["efficientvit_m0", "nest_tiny"], AT_224),
    "vit_tiny_patch16_224+avg": {**VIT, "global_pool": "avg"},
    "vit_small_patch14_reg4_dinov2": {**VIT, "img_size": 56},
    "eva02_tiny_patch14_224": {**VIT, "img_size": 56},
    "convit_tiny": {"img_size": 64, "depth": 2, "local_up_to_layer": 1},
    "xcit_nano_12_p16_224": {"img_size": 128, "depth": 2},
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "twins_svt_small": {"img_size": 128, "depths": (1, 1, 1, 1)},
    "resnetv2_50": {"layers": (1, 1, 1, 1)},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 48, "num_heads": 3},
    "swinv2_cr_tiny_224": {**SWIN, "window_size": None},
    "tiny_vit_5m_224": {"depths": (1, 1, 1, 1)},
    "res2net50_14w_8s": {"layers": (1, 1, 1, 1)},
    "t2t_vit_7": {**VIT, "token_dim": 16},
    "tnt_s_legacy_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "hiera_tiny_224": {"img_size": 224, "stages": (1, 1, 1, 1), "embed_dim": 24},
    "efficientformer_l1": {"img_size": 224, "depths": (1, 1, 1, 2), "embed_dims": (16, 24, 32, 48)},
    "sequencer2d_s": {"img_size": 128, "layers": (1, 1, 1, 1)},
    "hieradet_small": {"stages": (1, 1, 1, 1), "embed_dim": 24, "global_att_blocks": ()},
    "samvit_base_patch16": {**VIT, "global_attn_indexes": (1,)},
    "dpn48b": {"k_sec": (1, 1, 1, 1)},
    "efficientformerv2_s0": {"img_size": 224, "depths": (1, 1, 1, 2)},
    "tresnet_m": {"layers": (1, 1, 1, 1)},
    "visformer_tiny": {"img_size": 224, "depth": (1, 1, 1)},
    "cvt_13": {"embed_dims": (8, 16, 24), "depths": (1, 1, 2), "num_heads": (1, 2, 3)},
}
# as built, these answer next to nothing to an image: batch norms that have seen none, or start at 0
UNSEEN = ["tiny_vit_5m_224", "convmixer_768_32", "cpubone_nano", "inception_v3", "lcnetv2_small"]
LINEAR_AFTER_MEAN = [
    *("vit_medium_patch16_gap_240+nonorm", "mixer_s16_224", "resmlp_12_224", "swin_tiny_patch4_window7_224"),
    *("swinv2_tiny_window8_256", "resnet18", "resnest14d", "resnetv2_50", "nf_resnet26", "efficientnet_b0"),
    *("tf_efficientnet_lite0", "regnetx_002", "regnety_002", "densenet121"),
]
KEYS: dict[str, list[str]] = {}  # of the plain timm models in `cached`


def build(name: str, **kwargs):
    if name.endswith("+nonorm"):
        return timm.create_model(name.split("+")[0], **VIT, fc_norm=False, num_classes=11)
    torch.manual_seed(0)
    return timm.create_model(name.split("+")[0], num_classes=11, **{**SWEEP[name], **kwargs})


@functools.cache
def cached(name: str) -> TokenModel:
    backbone = build(name)
    if name.startswith("convmixer"):  # which has no argument that makes it small
        backbone.blocks = backbone.blocks[:4]
    KEYS[name] = list(backbone.state_dict())
    if name in UNSEEN:
        for module in backbone.modules():
            if isinstance(module, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d):
                torch.nn.init.ones_(module.weight)
                module.momentum = None
        with torch.no_grad():
            backbone.train()(torch.randn(8, 3, size_of(name), size_of(name)))
    return TokenModel(backbone, token_classes=5).eval()


def size_of(name: str, default: int = 128) -> int:
    return SWEEP[name].get("img_size", 224 if name.startswith("inception") else default)  # without padding


def test_the_sweep_covers_what_is_promised():
    assert len(SWEEP) >= 40
    covered = {model_entrypoint(n.split("+")[0]).__module__.rsplit(".", 1)[-1] for n in SWEEP}
    assert covered >= set(FAMILIES)
    timms = [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("timm.")]
    assert sum(family_of_name(name) is not None for name in timms) >= 1_290


@pytest.mark.parametrize("name", SWEEP)
def test_the_grid_lies_as_the_image_does(name):
    model, size = cached(name), size_of(name)
    noise = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    step = size // 4
    squares = [(3, 1), (0, 1), (1, 3), (1, 0)]  # (row, column) of a bright square: bottom, top, right, left
    images = noise.repeat(5, 1, 1, 1).unflatten(0, (5, 2))
    for image, (row, column) in zip(images, squares, strict=False):
        image[..., row * step : (row + 1) * step, column * step : (column + 1) * step] += 3.0
    with torch.no_grad():
        grids = model(images.flatten(0, 1)).grid.unflatten(0, (5, 2))
    response = ((grids[:4] - grids[4]).norm(dim=-1) ** 4).mean(1)  # [4, h, w]
    h, w = response.shape[1:]
    total = response.sum((1, 2))
    rows = (response.sum(2) @ (torch.arange(h) / h)) / total
    columns = (response.sum(1) @ (torch.arange(w) / w)) / total
    assert rows[0] - rows[1] > max(0.02, 2 * abs(columns[0] - columns[1]))
    assert columns[2] - columns[3] > max(0.02, 2 * abs(rows[2] - rows[3]))


@pytest.mark.parametrize("name", SWEEP)
def test_class_logits_are_the_models_own_and_shapes_fit(name):
    model = cached(name)
    size = size_of(name)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        view = model(x)
        assert torch.allclose(view.logits, model.backbone(x), atol=1e-5)
    h, w = view.grid.shape[1:3]
    assert view.grid.shape == (2, h, w, model.num_features)
    assert view.token_logits.shape == (2, h, w, 5)
    by_name = family_of_name(name.split("+")[0])  # modules of timm may share a row under another title
    assert by_name is not None
    assert replace(by_name, title="") == replace(model.family, title="")
    assert view.prefix is None or view.prefix.shape[::2] == (2, model.num_features)


@pytest.mark.parametrize("name", SWEEP)
def test_gradients_flow_and_the_state_dict_stays_timms(name):
    model = copy.deepcopy(cached(name)).train()
    size = size_of(name, 64)
    view = model(torch.randn(2, 3, size, size))
    (view.token_logits.square().mean() + view.logits.square().mean()).backward()
    first = next(p for p in model.backbone.parameters() if p.ndim > 1 and p.requires_grad)
    assert bool(torch.isfinite(first.grad).all())
    assert float(first.grad.abs().sum()) > 0
    assert list(model.backbone.state_dict()) == KEYS[name]


@pytest.mark.parametrize("name", LINEAR_AFTER_MEAN)
def test_the_mean_of_the_cell_logits_is_the_models_answer_where_pooling_is_a_mean(name):
    model = TokenModel(build(name)).eval()
    size = 64 if name.endswith("+nonorm") else size_of(name)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        cells = model.cell_logits(x)
        assert torch.allclose(cells.mean((1, 2)), model.backbone(x), atol=1e-4)


def test_cells_of_convnext_pass_its_norm_one_by_one():
    model = TokenModel(build("convnext_atto")).eval()
    x = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        features = model.backbone.forward_features(x)
        wanted = model.backbone.head.fc(model.backbone.head.norm(features)[0, :, 2, 1])
        assert torch.allclose(model.cell_logits(x)[0, 2, 1], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "lvvit_t"])
def test_cells_of_a_class_token_model_are_its_class_head_on_patch_tokens(name):
    model = TokenModel(build(name)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        view = model(x)
        wanted = model.backbone.head(view.grid)
        if name.startswith("deit_tiny_distilled"):
            wanted = (wanted + model.backbone.head_dist(view.grid)) / 2
        assert torch.allclose(model.cell_logits(x), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lvvit_t", {"img_size": (64, 96)}),
        ("vit_tiny_patch16_224", {"img_size": (96, 64)}),
        ("cait_xxs24_224", {"img_size": (64, 96)}),
        ("mixer_s16_224", {"img_size": (64, 96)}),
        ("volo_d1_224", {"img_size": (64, 96)}),
        ("swin_tiny_patch4_window7_224", {"img_size": (128, 192)}),
        ("t2t_vit_7", {"img_size": (64, 96)}),
        ("cvt_13", {"img_size": (64, 96)}),
        ("resnet18", {}),
    ],
)
def test_rectangular_images_give_rectangular_grids(name, arguments):
    model = TokenModel(build(name, **arguments)).eval()
    height, width = arguments.get("img_size", (128, 192))
    h, w = probe(model, (height, width))
    assert h * width == w * height


def test_grid_shapes_come_from_the_image_proportions():
    assert grid_shape(196, (224, 224)) == (14, 14)
    assert grid_shape(280, (224, 320)) == (14, 20)
    assert grid_shape(280, (320, 224)) == (20, 14)
    assert grid_shape(6, (33, 48)) == (2, 3)


def test_lvvit_and_volo_use_the_token_head_that_they_bring():
    for name in ("lvvit_t", "volo_d1_224"):
        model = TokenModel(build(name), token_classes=11).eval()
        assert model.token_head is None
        view = model(torch.randn(1, 3, 64, 64))
        assert torch.allclose(view.token_logits, model.backbone.aux_head(view.grid))
        other = TokenModel(build(name), token_classes=7)
        assert other(torch.randn(1, 3, 64, 64)).token_logits.shape[-1] == 7


def test_volo_is_trained_on_its_class_token_alone():
    model = TokenModel(copy.deepcopy(cached("volo_d1_224").backbone), token_classes=11).train()
    features = model.backbone.forward_features(torch.randn(2, 3, 64, 64))
    logits, _ = model._class_logits(features)
    assert torch.allclose(logits, model.backbone.head(features[:, 0]), atol=1e-6)


def test_the_distillation_token_has_its_own_logits_while_training():
    backbone = build("deit_tiny_distilled_patch16_224")
    backbone.set_distilled_training(True)
    model = TokenModel(backbone).train()
    view = model(torch.randn(2, 3, 64, 64))
    assert view.distill_logits.shape == (2, 11)
    assert model.eval()(torch.randn(2, 3, 64, 64)).distill_logits is None


def test_unsupported_models_are_refused_with_what_is_missing():
    with pytest.raises(UnsupportedModelError, match=r"CrossVit.*two branches"):
        TokenModel(timm.create_model("crossvit_tiny_240"))
    assert family_of_name("crossvit_tiny_240") is None
    assert family_of_name("resnet50").title.startswith("ResNet")


def test_subclasses_of_a_timm_model_are_seen_as_their_family():
    class Mine(timm.models.VisionTransformer):
        pass

    model = TokenModel(Mine(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=3))
    assert model(torch.randn(1, 3, 32, 32)).grid.shape == (1, 4, 4, 24)


APART = [  # their patches do not overlap, so that mixing tokens is mixing pixels
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "cait_xxs24_224", "swin_tiny_patch4_window7_224"),
    *("swinv2_tiny_window8_256", "mixer_s16_224", "convnext_atto"),
]


@pytest.mark.parametrize("name", [*APART, "lvvit_t", "t2t_vit_7", "cvt_13", "volo_d1_224", "mvitv2_tiny"])
def test_tokens_are_mixed_after_patch_embedding_and_put_back_at_the_end(name):
    model, size = cached(name), size_of(name)
    grid = probe(model, (size, size))
    mask = torch.ones(1, *grid)
    mask[:, grid[0] // 2 :] = 0  # the lower half comes from the partner
    mix = Mix(torch.tensor([1, 0]), mask, torch.tensor([0.5, 0.5]), "tokens")
    images = torch.randn(2, 3, size, size)

    def swapped(module, args, output):
        tokens, *more = output if isinstance(output, tuple) else (output,)  # with the size of the grid
        rows = 2 if tokens.ndim == 4 and model.family.embed_layout == "nchw" else 1
        tokens = tokens.clone()  # row after row, so that the second half of the tokens are those below
        half = tokens.shape[rows] // 2
        tokens.narrow(rows, half, half).copy_(tokens.flip(0).narrow(rows, half, half).clone())
        return (tokens, *more) if more else tokens

    with torch.no_grad():
        mixed = model(images, mix)
        hook = model.backbone.get_submodule(model.family.embed).register_forward_hook(swapped)
        by_hand = model(images)
        hook.remove()
        assert torch.allclose(mixed.logits, by_hand.logits, atol=1e-5)
        unmixed = torch.where(mask[..., None] > 0, by_hand.grid, by_hand.grid.flip(0))
        assert torch.allclose(mixed.grid, unmixed, atol=1e-5)
        assert not torch.allclose(by_hand.grid, model(images).grid, atol=1e-3)
        if name in APART:
            pixels = images.clone()
            pixels[:, :, size // 2 :] = images.flip(0)[:, :, size // 2 :]
            assert torch.allclose(mixed.logits, model(pixels).logits, atol=1e-4)


def test_backbones_without_reachable_patches_offer_cutmix():
    mix = Mix(torch.tensor([0]), torch.ones(1, 4, 4), torch.ones(1), "tokens")
    with pytest.raises(EverytokenError, match="CutMix"):
        cached("resnet18")(torch.randn(1, 3, 128, 128), mix)


def test_a_copy_of_the_backbone_forgets_the_mixing():
    model = cached("vit_tiny_patch16_224")
    mix = Mix(torch.tensor([1, 0]), torch.zeros(1, 4, 4), torch.zeros(2), "tokens")
    images = torch.randn(2, 3, 64, 64)
    alone, together = copy.deepcopy(model.backbone), copy.deepcopy(model)
    with torch.no_grad():
        assert torch.allclose(together(images, mix).logits, model(images, mix).logits)
        assert torch.allclose(alone(images), model(images).logits, atol=1e-6)


def test_mixing_compiles_as_one_graph():
    model = cached("vit_tiny_patch16_224")
    mask = torch.ones(1, 4, 4)
    mask[:, :2] = 0
    mix = Mix(torch.tensor([1, 0]), mask, torch.tensor([0.5, 0.5]), "tokens")
    images = torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(images, mix).token_logits, model(images, mix).token_logits, atol=1e-5)
        assert torch.allclose(compiled(images).token_logits, model(images).token_logits, atol=1e-5)


def test_a_backbone_is_the_plain_timm_model_again_after_every_pass():
    model = cached("vit_tiny_patch16_224")
    backbone, embed = model.backbone, model.backbone.patch_embed
    before = [len(m._forward_hooks) for m in backbone.modules()]
    images = torch.randn(2, 3, 64, 64)
    mix = Mix(torch.tensor([1, 0]), torch.zeros(1, 4, 4), torch.zeros(2), "tokens")
    with torch.no_grad():
        model(images, mix)
        with pytest.raises(ValueError, match="mix"):
            model(images[:1], mix)  # too few images
        assert backbone.patch_embed is embed
        assert [len(m._forward_hooks) for m in backbone.modules()] == before == [0] * len(before)
        scripted = torch.jit.script(backbone)
        assert torch.allclose(scripted(images), backbone(images), atol=1e-5)
