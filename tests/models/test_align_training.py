"""Alignment where models are really trained: autocast, compile, checkpointing, drop path, DDP, copies."""

import copy
import os
import pickle
import socket

import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.utils.checkpoint import checkpoint

import everytoken as et
from everytoken.errors import EverytokenError
from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models import TokenModel
from everytoken.models.align import Aligner, Alignment
from everytoken.models.align.fused import attend
from tests.models import by_hand

B, K = 4, 6
LABELS = torch.arange(B)
VIT = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": K}
SWIN = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": K}


def make(name="deit_tiny_patch16_224", **more):
    torch.manual_seed(0)
    if name == "mixer":
        return MlpMixer(num_classes=K, img_size=64, patch_size=16, num_blocks=2, embed_dim=32).train()
    if name == "resnet":
        return ResNet(BasicBlock, [1, 1, 1, 1], channels=(8, 8, 12, 12), num_classes=K).train()
    options = {**SWIN, "drop_path_rate": 0.0} if name.startswith("swin") else VIT
    model = timm.create_model(name, **{**options, **more}).train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("qkv.weight"):
                value.normal_(std=0.3)
    return model


def batch():
    images, mix = by_hand.batch(64, B)
    return images, et.Mix(mix.partner, mix.mask, mix.ratio, "pixels")


def step(model, aligner, run=None):
    """(logits, shares, gradients) of one aligned training step."""
    images, mix = batch()
    with aligner.watch(mix) as seen:
        logits = (model if run is None else run)(images)
    loss = aligned_cross_entropy(logits, LABELS, LABELS[mix.partner], seen.shares.image)
    return logits, seen.shares, torch.autograd.grad(loss, list(model.parameters()))


def assert_same(a, b):
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1].grid, b[1].grid)
    torch.testing.assert_close(a[2], b[2])


def test_watching_changes_neither_logits_nor_the_state_dict_nor_evaluation():
    model = make()
    images, mix = batch()
    before, keys = model(images), list(model.state_dict())
    aligner = Aligner(model)
    with aligner.watch(mix):
        watched = model(images)
    assert torch.equal(before, watched)
    assert torch.equal(before, model(images))
    assert list(model.state_dict()) == keys
    aligner.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    token_model = TokenModel(model).eval()
    before = token_model(images).logits
    token_model.align()
    after = token_model(images)
    assert torch.equal(before, after.logits)
    assert after.shares is None


def test_under_mixup_nothing_moves():
    ratio = torch.tensor([0.3, 0.5, 0.9, 1.0])
    model = make()
    with Aligner(model).watch(by_hand.unmixed(ratio)) as seen:
        model(batch()[0])
    torch.testing.assert_close(seen.shares.image, ratio)
    torch.testing.assert_close(seen.shares.grid, ratio[:, None, None].expand(B, 4, 4))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_gradient_checkpointing_changes_nothing(name):
    model = make(name)
    aligner = Aligner(model)
    plain = step(model, aligner)
    model.set_grad_checkpointing()
    assert_same(step(model, aligner), plain)
    assert aligner.state.shares is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_somebody_else_checkpoints_fit_when_they_are_run_again(reentrant):
    model = make()
    aligner = Aligner(model)
    plain = step(model, aligner)

    class Again(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model.blocks = nn.Sequential(*[Again(b) for b in model.blocks])
    images, mix = batch()
    with aligner.watch(mix) as seen:
        logits = model(images)
    aligned_cross_entropy(logits, LABELS, LABELS[mix.partner], seen.shares.image).backward()
    assert_same((logits, seen.shares, [p.grad for p in model.parameters()]), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "cait_xxs24_224", "mixer", "resnet"]
)
def test_shares_stay_exact_enough_under_autocast(name, dtype):
    model = make(name)
    aligner = Aligner(model)
    images, mix = batch()
    with aligner.watch(mix) as exact:
        model(images)
    with torch.autocast("cpu", dtype), aligner.watch(mix) as seen:
        plain_logits = model(images)
    assert seen.shares.image.dtype == torch.float32
    # where only weights mix places, half precision of the activations must not matter at all
    closeness = 1e-6 if name in ("mixer", "resnet") else 5e-3
    torch.testing.assert_close(seen.shares.grid, exact.shares.grid, atol=closeness, rtol=0)
    assert not seen.shares.grid.requires_grad
    aligned_cross_entropy(plain_logits, LABELS, LABELS[mix.partner], seen.shares.image).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_drop_path_and_dropout_stay_out_of_the_shares():
    calm = make()
    wild = make(drop_path_rate=0.0, proj_drop_rate=0.0, attn_drop_rate=0.5)
    wild.load_state_dict(calm.state_dict())
    images, mix = batch()
    # only the first layer sees the same input in both models
    with Aligner(calm, Alignment(layers=(1,))).watch(mix) as seen:
        calm(images)
    with Aligner(wild, Alignment(layers=(1,))).watch(mix) as dropped:
        wild(images)
    torch.testing.assert_close(dropped.shares.grid, seen.shares.grid, atol=1e-6, rtol=0)

    model = make(drop_path_rate=0.5)
    aligner = Aligner(model)
    torch.manual_seed(3)
    plain = model(images)
    torch.manual_seed(3)
    with aligner.watch(mix) as seen:
        watched = model(images)
    assert torch.equal(plain, watched), "watching used random numbers"
    assert seen.shares.image.isfinite().all()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deit_tiny_patch16_224", {"depth": 1}),
        ("swin_tiny_patch4_window7_224", {"depths": (1,), "num_heads": (2,)}),
        ("resnet", {}),
    ],
)
def test_a_compiled_model_gives_the_same(model, options):
    torch._dynamo.reset()
    with_gradients = "deit" in model  # through the tracer of the backward pass, too
    model = make(model, **options)
    aligner = Aligner(model)
    plain = step(model, aligner)
    compiled = torch.compile(model, backend="aot_eager" if with_gradients else "eager", fullgraph=True)
    assert_same(step(model, aligner, compiled), plain)
    if with_gradients:
        images, _ = batch()
        torch.testing.assert_close(compiled(images), model(images))  # without a mix
        assert_same(step(model, aligner, compiled), plain)  # and again with one


def test_the_whole_token_view_can_be_compiled_as_one_graph():
    torch._dynamo.reset()
    model = TokenModel(make(depth=1), token_classes=3)
    model.align()
    images, mix = batch()
    view = model(images, mix)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        again = compiled(images, mix)
        torch.testing.assert_close(again.logits, view.logits)
        torch.testing.assert_close(again.shares.image, view.shares.image)
        assert compiled(images).shares is None


@pytest.mark.parametrize("again", [False, True])
def test_both_ways_through_fused_attention_are_exact(again):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (5, 9, 9))
    values = torch.rand(2, 9, 2)
    out, mixed = attend(values, again, q, k, v, scale=0.3)
    matrix = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
    torch.testing.assert_close(out, matrix @ v)
    torch.testing.assert_close(mixed, matrix.mean(1) @ values)
    assert not mixed.requires_grad
    weight = torch.randn(2, 3, 5, 16)
    got = torch.autograd.grad((out * weight).sum(), [q, k, v])
    for a, b in zip(got, torch.autograd.grad(((matrix @ v) * weight).sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["bias", "bool", "causal", "grouped"])
def test_masks_biases_and_grouped_heads_are_seen(kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    values, wide = torch.rand(2, 6, 1), [t.repeat_interleave(2, 1) for t in (k, v)]
    seen = torch.rand(6, 6) > 0.3
    seen.fill_diagonal_(True)
    random = torch.randn(2, 4, 6, 6, requires_grad=True)
    how, bias = {
        "bias": ({"attn_mask": random}, random),
        "bool": ({"attn_mask": seen}, torch.zeros(6, 6).masked_fill(~seen, -torch.inf)),
        "causal": ({"is_causal": True}, torch.full((6, 6), -torch.inf).triu(1)),
        "grouped": ({"enable_gqa": True}, torch.zeros(6, 6)),
    }[kind]
    out, mixed = attend(values, False, q, *((k, v) if kind == "grouped" else wide), **how)
    matrix = (q @ wide[0].transpose(-1, -2) / 8**0.5 + bias).softmax(-1)
    torch.testing.assert_close(mixed, matrix.mean(1) @ values)
    torch.testing.assert_close(out, matrix @ wide[1])


def test_copies_and_pickles_of_a_watched_model_are_plain_models():
    model = make()
    aligner = Aligner(model)
    images, mix = batch()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.01)
        with aligner.watch(mix):
            twin_logits = twin(images)  # the twin has its own idle state
            model(images)
        fresh = make()
        fresh.load_state_dict(twin.state_dict())
        assert torch.equal(twin_logits, fresh(images))


def test_a_copy_of_a_token_view_aligns_by_itself():
    model = TokenModel(make())
    model.align()
    images, mix = batch()
    wanted = model(images, mix).shares.image
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(images, mix).shares.image, wanted)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2.0)
        assert (twin(images, mix).shares.image - wanted).abs().max() > 1e-4
        torch.testing.assert_close(model(images, mix).shares.image, wanted)
        assert list(twin.backbone.state_dict()) == list(make().state_dict())


def test_an_interrupted_pass_leaves_nothing_behind():
    model = make()
    aligner = Aligner(model)
    images, mix = batch()
    broken = model.blocks[2].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), aligner.watch(mix):
        model(images)
    broken.remove()
    assert aligner.state.shares is None
    assert torch.equal(model(images), make()(images))


def _worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    images, mix = batch()
    model = make()
    ddp = nn.parallel.DistributedDataParallel(model)
    aligner = Aligner(model)
    mine = slice(2 * rank, 2 * rank + 2)
    part = et.Mix(mix.partner[mine], mix.mask[mine], mix.ratio[mine], "pixels")
    with aligner.watch(part) as seen:
        logits = ddp(images[mine])
    aligned_cross_entropy(logits, LABELS[mine], LABELS[mix.partner][mine], seen.shares.image).backward()
    queue.put((rank, seen.shares.image.tolist(), model.blocks[0].attn.qkv.weight.grad.norm().item()))
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one():
    model = make()
    _, shares, grads = step(model, Aligner(model))
    names = [name for name, _ in model.named_parameters()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_worker, args=(rank, port, queue)) for rank in range(2)]
    for w in workers:
        w.start()
    found = sorted(queue.get() for _ in workers)
    for w in workers:
        w.join()
    torch.testing.assert_close(torch.tensor(found[0][1] + found[1][1]), shares.image)
    wanted = grads[names.index("blocks.0.attn.qkv.weight")].norm().item()
    assert found[0][2] == pytest.approx(wanted, rel=1e-4)
    assert found[0][2] == found[1][2]


def test_a_mix_of_tokens_needs_a_model_that_mixes_them():
    images, mix = et.MixToken()(batch()[0], grid=(4, 4))
    plain = make()
    model = TokenModel(plain)
    for unmixed in (plain, model):
        with pytest.raises(EverytokenError, match="called with the mix"), et.aligned(unmixed, mix):
            unmixed(images)
    with et.aligned(model, mix) as shares:
        model(images, mix)
    assert shares.shares.image.shape == (B,)
