"""What `aligned` and TokenModel make of compiled, distributed, sharded and home-made wrappers of a backbone."""

import pytest
import timm
import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import everytoken as et
from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Mix

K = 3


def vit(**more):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": K}
    model = timm.create_model("vit_tiny_patch16_224", **{**options, **more})
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.5)
    return model


@pytest.fixture
def batch():
    mask = torch.ones(2, 32, 32)
    mask[:, :20] = 0
    return torch.randn(2, 3, 32, 32), Mix(torch.tensor([1, 0]), mask, mask.mean((1, 2)), "pixels")


@pytest.fixture
def process_group(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def shares_of(model, images, mix, forward=None):
    with et.aligned(model, mix) as shares:
        (forward or model)(images)
    return shares.shares.image


class Net(nn.Module):
    def __init__(self, net, head=None):
        super().__init__()
        self.net, self.head = net, head or nn.Identity()

    def forward(self, images):
        return self.head(self.net(images))


def test_aligned_sees_through_wrappers(batch, process_group):
    model = vit()
    wanted = shares_of(model, *batch)
    assert (wanted - batch[1].ratio).abs().max() > 1e-3
    for wrapper in (DataParallel, DistributedDataParallel, Net, et.TokenModel):
        torch.testing.assert_close(shares_of(wrapper(model), *batch), wanted)
    model.reset_classifier(0)
    torch.testing.assert_close(shares_of(Net(model, nn.Linear(24, 2)), *batch), wanted)


def test_aligned_follows_a_model_that_was_compiled_before(batch):
    wanted = shares_of(vit(), *batch)
    compiled = torch.compile(vit(), backend="eager")
    compiled(batch[0])
    torch.testing.assert_close(shares_of(compiled, *batch), wanted)
    in_place = vit()
    in_place.compile(backend="eager")
    in_place(batch[0])
    torch.testing.assert_close(shares_of(Net(in_place), *batch), wanted)


def test_a_token_model_takes_the_backbone_and_leaves_nothing_out(batch, process_group):
    model, images = vit(), batch[0]
    for wrapper in (Net, torch.compile):
        assert et.TokenModel(wrapper(model)).backbone is model
    with pytest.raises(EverytokenError, match=r"DistributedDataParallel\(TokenModel\(model\)\)"):
        et.TokenModel(DistributedDataParallel(model))
    with pytest.raises(EverytokenError, match=r"Net has weights of its own \(head\.weight, head\.bias\)"):
        et.TokenModel(Net(model, nn.Linear(K, K)))
    with pytest.raises(EverytokenError, match=r"holds 2 backbones: .* at 'net', .* at 'head'"):
        et.TokenModel(Net(model, vit()))
    assert et.TokenModel(Net(model))(images).logits.shape == (2, K)


def test_objectives_take_a_compiled_token_model(batch):
    images, mix = batch
    model = et.TokenModel(vit())
    align = et.TLAlign(torch.compile(model, backend="eager"))
    view = model(images, mix)
    assert view.shares is not None
    assert align(view, et.Batch(images, torch.tensor([0, 1])))["loss"] > 0


def test_a_sharded_backbone_shows_its_tokens(batch, process_group):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    images, mix = batch
    wanted = et.TokenModel(vit())(images)
    model = vit()
    for block in model.blocks:
        fully_shard(block)
    sharded = fully_shard(model)
    view = et.TokenModel(sharded)(images)
    torch.testing.assert_close(view.logits, wanted.logits)
    torch.testing.assert_close(view.grid, wanted.grid)
    (view.logits.sum() + view.grid.sum()).backward()
    assert all(isinstance(p.grad, DTensor) for p in sharded.parameters())
    torch.testing.assert_close(shares_of(sharded, images, mix), shares_of(vit(), images, mix))
    with pytest.raises(EverytokenError, match=r"fully_shard\(TokenModel\(model"):
        et.TokenModel(sharded, token_classes=K)


def test_a_view_can_be_exported_and_is_a_pytree(batch):
    model = et.TokenModel(vit(), token_classes=4).eval()
    images = batch[0]
    exported = torch.export.export(model, (images,)).module()(images)
    torch.testing.assert_close(exported.token_logits, model(images).token_logits)
    leaves = torch.utils._pytree.tree_leaves(model(images))
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 4
