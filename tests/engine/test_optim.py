"""Optimizers and schedules."""

import pytest
import timm
import torch
from torch import nn

import everytoken  # noqa: F401
from everytoken.models import TokenModel
from everytoken_lab.engine.optim import build_optimizer, build_schedule, warmup_epochs
from everytoken_lab.engine.options import OptimOptions


class Trained(nn.Module):
    """A backbone, and what an objective trains besides."""

    def __init__(self):
        super().__init__()
        self.model = TokenModel(timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=3))
        self.extra = nn.Linear(12, 2)


def groups_of(**options):
    """name of each parameter -> its group."""
    module = Trained()
    chosen = OptimOptions(weight_decay=0.1, **options)
    optimizer = build_optimizer(module, module.model.backbone, chosen, lr=1.0)
    names = {id(p): name.removeprefix("model.backbone.") for name, p in module.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("layer_decay", [0.0, 0.5])
def test_biases_norms_and_tokens_are_not_decayed(layer_decay):
    groups = groups_of(layer_decay=layer_decay)
    decayed = {name for name, group in groups.items() if group["weight_decay"]}
    assert all(groups[name]["weight_decay"] == 0.1 for name in decayed)
    weights = [
        f"blocks.{i}.{part}.weight" for i in range(3) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    assert decayed == {"patch_embed.proj.weight", *weights, "head.weight", "extra.weight"}
    assert {"cls_token", "pos_embed", "blocks.0.norm1.weight", "norm.bias", "extra.bias"} <= set(groups) - decayed


def test_layer_decay_lowers_the_rate_from_the_top_down():
    groups = groups_of(layer_decay=0.5)
    scale = {name: group["lr_scale"] for name, group in groups.items()}
    assert scale["extra.weight"] == scale["head.weight"] == 1.0
    assert [scale[f"blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert scale["cls_token"] == scale["patch_embed.proj.weight"] == 0.0625


def test_linear_goes_straight_from_the_warm_up_line_to_the_end():
    """The rate at update t is t / w of the peak in warm-up, then min + (peak - min) (1 - t / T)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=6e-5)
    options = OptimOptions(epochs=4, sched="linear", warmup_epochs=0.5, warmup_lr=0.0, min_lr=5e-6)
    schedule, updates = build_schedule(optimizer, options, updates_per_epoch=10)
    assert updates == 40
    for t in range(1, 41):
        schedule.step_update(t)
        expected = 6e-5 * t / 5 if t < 5 else 5e-6 + (6e-5 - 5e-6) * (1 - t / 40)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected), t


@pytest.mark.parametrize(("epochs", "warmup"), [(3, 0.3), (5, 0.5), (6, 5.0)])
def test_warm_up_never_lasts_for_the_whole_training(epochs, warmup):
    """Five epochs of warm-up are the default, also for those who ask for three epochs."""
    options = OptimOptions(epochs=epochs, lr=1e-2)
    assert warmup_epochs(options, 10) == pytest.approx(warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    schedule, updates = build_schedule(optimizer, options, 10)
    rates = []
    for step in range(updates):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert abs(rates.index(max(rates)) - warmup * 10) <= 1
    assert rates[-1] < max(rates) > 0.9e-2
    assert warmup_epochs(OptimOptions(iters=100, warmup_iters=200), 10) == 10
    assert warmup_epochs(OptimOptions(iters=100, warmup_iters=20), 10) == 20
