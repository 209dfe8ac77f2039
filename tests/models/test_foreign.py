"""Backbones of torchvision and Hugging Face against timm's with the same weights: equal logits, equal shares."""

import re

import pytest
import timm
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from torchvision.models.vision_transformer import VisionTransformer

import everytoken as et
from everytoken.mixing.mix import Mix
from everytoken.models import FOREIGN, UnsupportedModelError, family_of
from everytoken.models.align import HookBuilder
from everytoken.models.align.attention import InterceptAttention
from everytoken.models.align.state import ShareState

K, SIZE = 5, 32
SWIN = {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 3)}
VIT = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}
HF_VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIZE, "patch_size": 8}
HF_VIT |= {"intermediate_size": 96, "layer_norm_eps": 1e-6, "num_labels": K}


def torchvision_vit():
    return VisionTransformer(SIZE, 8, 2, 2, 24, 96, num_classes=K), timm.create_model("vit_tiny_patch16_224", **VIT)


def torchvision_swin():
    return SwinTransformer([4, 4], 24, [2, 2], [2, 3], [4, 4], stochastic_depth_prob=0.0, num_classes=K), timm_swin()


def timm_swin():
    return timm.create_model("swin_tiny_patch4_window7_224", **SWIN, drop_path_rate=0.0)


def huggingface(name, twin, attention="sdpa", model="ForImageClassification", **config):
    """A network of transformers, and timm's."""

    def build():
        transformers = pytest.importorskip("transformers")
        options = getattr(transformers, f"{name}Config")(**config)
        options._attn_implementation = attention
        return getattr(transformers, name + model)(options), twin()

    return build


def timm_vit(name="vit_tiny_patch16_224", **more):
    return lambda: timm.create_model(name, **VIT, **more)


HF_SWIN = {"image_size": 64, "window_size": 4, "depths": [2, 2], "embed_dim": 24, "num_heads": [2, 3], "num_labels": K}
HF_SWIN |= {"drop_path_rate": 0.0}
DINO = timm_vit("vit_small_patch14_dinov2", init_values=0.3)
BUILDERS = {
    "torchvision ViT": torchvision_vit,
    "torchvision Swin": torchvision_swin,
    "ViT": huggingface("ViT", timm_vit(), **HF_VIT),
    "ViT, explicit": huggingface("ViT", timm_vit(), "eager", **HF_VIT),
    "ViTModel": huggingface("ViT", timm_vit(), model="Model", **HF_VIT),
    "DeiT, two heads": huggingface(
        "DeiT", timm_vit("deit_tiny_distilled_patch16_224"), model="ForImageClassificationWithTeacher", **HF_VIT
    ),
    "DINOv2": huggingface("Dinov2", DINO, layerscale_value=0.3, **HF_VIT),
    "Swin": huggingface("Swin", timm_swin, **HF_SWIN),
    "Swin, explicit": huggingface("Swin", timm_swin, "eager", **HF_SWIN),
}
RENAMED = [
    (r"^(vit|deit|dinov2|swin)\.", ""),
    (r"class_token|embeddings\.cls_token", "cls_token"),
    (r"encoder\.pos_embedding|embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"conv_proj|embeddings\.patch_embeddings\.projection|features\.0\.0", "patch_embed.proj"),
    (r"embeddings\.norm|features\.0\.2", "patch_embed.norm"),
    (r"^features\.(\d+)\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.blocks.{m[2]}."),
    (r"^features\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.downsample."),
    (r"^encoder\.layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) + 1}.downsample"),
    (r"^encoder\.layers\.(\d+)\.blocks", r"layers.\1.blocks"),
    (r"^(?:encoder\.)?layers?\.(?:encoder_layer_)?(\d+)\.(?!blocks|downsample)", r"blocks.\1."),
    (r"self_attention\.in_proj_", "attn.qkv."),
    (r"self_attention\.out_proj|attention\.(?:output\.)?(?:dense|o_proj)", "attn.proj"),
    (r"attention\.(?:relative_position_bias)", "attn.relative_position_bias"),
    (r"attn\.relative_position_bias\.relative", "attn.relative"),
    (r"attention\.(.)_proj", r"attn.\1"),
    (r"ln_1|layernorm_before", "norm1"),
    (r"ln_2|layernorm_after", "norm2"),
    (r"mlp\.0", "mlp.fc1"),
    (r"mlp\.3", "mlp.fc2"),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"^(encoder\.ln|layernorm)\b", "norm"),
    (r"heads\.head|^(cls_)?classifier", "head"),
    (r"distillation_classifier", "head_dist"),
]


def give_weights(model, twin):
    """Random weights for both; the twin keeps its own head where the heads differ."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in model.named_parameters():
        with torch.no_grad():
            value.normal_(std=0.2, generator=generator)
        for pattern, new in RENAMED:
            name = re.sub(pattern, new, name)
        state[name] = value.detach()
    for name in [n for n in state if ".attn.q." in n]:
        state[name.replace(".q.", ".qkv.")] = torch.cat([state.pop(name.replace(".q.", f".{c}.")) for c in "qkv"])
    if isinstance(twin.head, nn.Module) and hasattr(twin.head, "fc"):
        state = {re.sub(r"^head\.", "head.fc.", name): value for name, value in state.items()}
    if state.get("head.weight", torch.empty(0, 24)).shape[-1] != 24 or "head.weight" not in state:
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
    known = twin.state_dict()
    wanted = {name for name in known if not name.startswith("head.") or name in state}
    ignored = {"mask_token", "embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"}
    assert wanted - set(state) <= {n for n in wanted if n.endswith(("relative_position_index", "attn_mask"))}
    assert set(state) - wanted <= ignored
    twin.load_state_dict(
        {name: value.reshape(known[name].shape) for name, value in state.items() if name in known}, False
    )
    return "head.weight" in state or "head.fc.weight" in state


def mixed(size, batch=3, level="pixels"):
    torch.manual_seed(0)
    mask = torch.ones(batch, size, size)
    for i in range(batch):
        mask[i, 8 * i : 24, 4:24] = 0
    return torch.randn(batch, 3, size, size), Mix(torch.tensor([1, 2, 0]), mask, mask.mean((1, 2)), level)


@pytest.mark.parametrize("name", BUILDERS)
def test_logits_tokens_and_shares_are_those_of_timms_network(name):
    torch.manual_seed(0)
    model, twin = BUILDERS[name]()
    twin.reset_classifier(K)
    model, twin = model.train(), twin.train()
    same_head = give_weights(model, twin)
    size = 64 if "Swin" in name else SIZE
    images, mix = mixed(size)
    seen, wanted = et.TokenModel(model, token_classes=3), et.TokenModel(twin)
    seen.align()
    wanted.align()
    view, other = seen(images, mix), wanted(images, mix)
    if same_head:
        torch.testing.assert_close(view.logits, other.logits, atol=1e-4, rtol=1e-4)
    answer = model(images)
    answer = getattr(answer, "logits", answer)
    if isinstance(answer, torch.Tensor):
        torch.testing.assert_close(view.logits, answer, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(view.grid, other.grid, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(view.shares.grid, other.shares.grid, atol=1e-5, rtol=1e-5)
    if name == "DINOv2":  # its head reads the class token and the mean of the others
        image = (other.shares.image + other.shares.grid.mean((1, 2))) / 2
        torch.testing.assert_close(view.shares.image, image, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(view.shares.image, other.shares.image, atol=1e-5, rtol=1e-5)
    assert (view.shares.grid - mix.at(view.grid.shape[1:3])).abs().max() > 1e-2, (
        "nothing has moved, so nothing was tested"
    )
    (view.logits.mean() + view.token_logits.square().mean()).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if not re.search("pooler|mask_token", n))
    images, mix = mixed(size, level="tokens")
    tokens = Mix(mix.partner, (mix.at(view.grid.shape[1:3]) > 0.5).float(), mix.ratio, "tokens")
    torch.testing.assert_close(seen(images, tokens).grid, wanted(images, tokens).grid, atol=1e-4, rtol=1e-4)
    with et.aligned(model, mixed(size)[1]) as shares:
        model(images)
    torch.testing.assert_close(shares.shares.image, view.shares.image, atol=1e-5, rtol=1e-5)


def test_torchvision_windows_that_do_not_fit_the_map_are_followed_as_it_cuts_them():
    torch.manual_seed(0)
    for size, window, shift in (((7, 10), [4, 4], [2, 2]), ((4, 9), [4, 4], [2, 2])):
        block = SwinTransformerBlock(4, 1, window, shift)
        with torch.no_grad():  # values are the tokens themselves, so attention can be read from what it returns
            block.attn.qkv.weight[8:] = torch.eye(4)
            block.attn.qkv.weight[:8].normal_(std=2.0)
            block.attn.proj.weight.copy_(torch.eye(4))
            block.attn.qkv.bias.zero_()
            block.attn.proj.bias.zero_()
        shares = torch.rand(2, *size)
        block.norm1 = nn.Identity()
        tokens = torch.stack((shares, torch.ones_like(shares), torch.randn_like(shares), torch.randn_like(shares)), -1)
        mixed, state = block.attn(tokens), ShareState()
        HookBuilder(state).attach(block, "block")
        state.mask, state.ratio, state.shares = torch.ones(2, 1, 1), torch.ones(2), shares
        with InterceptAttention(state):
            block(tokens)
        expected = (mixed[..., 0] / mixed[..., 1] + shares) / 2
        torch.testing.assert_close(state.shares, expected, atol=1e-5, rtol=1e-5)
        assert (expected - shares).abs().max() > 0.01


def test_networks_that_are_not_supported_name_timms():
    from torchvision.models import resnet18

    with pytest.raises(UnsupportedModelError, match=r"torchvision.*timm\.create_model\('resnet50'\)"):
        et.TokenModel(resnet18())
    with pytest.raises(UnsupportedModelError, match="neither is a network of timm"):
        et.TokenModel(nn.Sequential(nn.Linear(2, 2)))


def test_every_supported_class_has_what_timms_models_say_themselves():
    for family in FOREIGN.values():
        assert None not in (family.features, family.head, family.pool, family.embed)


def test_timm_inside_of_hugging_faces_wrapper_is_the_timm_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.TimmWrapperConfig(architecture="test_vit", model_args={"img_size": 32}, num_labels=K)
    model = transformers.TimmWrapperForImageClassification(config).eval()
    images, mix = mixed(32)
    assert family_of(et.TokenModel(model).backbone).title.startswith("ViT")
    torch.testing.assert_close(et.TokenModel(model)(images).logits, model(images).logits)
    with et.aligned(model, mix) as shares:
        model(pixel_values=images)
    assert shares.shares.image.shape == (3,)
