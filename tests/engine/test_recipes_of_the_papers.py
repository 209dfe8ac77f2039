"""Every shipped recipe against a table of the papers' numbers.

The table was typed from the papers and, for what they take from others, from the training code of DeiT and Swin and
from the released set-ups, not from the recipes. A value that none of these gives is marked "ours". Keys are option
names, except `batch` (the global batch, on `processes`), `lr` (the peak rate at that batch) and `rule` (how the rate
follows the batch).
"""

from dataclasses import replace

import pytest
import torch

from everytoken_lab.dense.detect import DetectOptions
from everytoken_lab.dense.segment import SegmentOptions
from everytoken_lab.engine.optim import build_schedule, learning_rate
from everytoken_lab.engine.options import TrainOptions, apply, flat, read_recipe, recipe_names

OURS = {  # of no paper
    *("small_32", "small_32_align", "small_32_drloc", "small_32_token", "small_64", "small_64_drloc", "small_64_token"),
    *("small_96", "small_96_token", "small_224_token", "detect_small", "deit_small_self"),
}
SPEED = {"amp"}  # what a recipe may set besides

RANDAUGMENT, RANDAUGMENT_3 = "rand-m9-mstd0.5-inc1", "rand-n3-m9-mstd0.5-inc1"
MIXTOKEN = {"mixtoken": {"alpha": 1.0}}  # All Tokens Matter, 3.3: masks as CutMix draws them
CUTMIX = {"cutmix": {"alpha": 1.0}}
BOTH = {"mixup": {"alpha": 0.8}, "cutmix": {"alpha": 1.0}}  # DeiT's main.py, Swin's config.py


# All Tokens Matter. Supplement, Table 1, and section 4.1 of the paper (AdamW, linear scaling).
TABLE_1 = {"epochs": 300, "batch": 1024, "processes": 8, "opt": "adamw", "sched": "cosine", "rule": "linear"}
TABLE_1 |= {"weight_decay": 0.05, "warmup_epochs": 5, "drop": 0.0, "drop_path": 0.1}
TABLE_1 |= {"reprob": 0.25, "aa": RANDAUGMENT, "img_size": 224, "scale": (0.08, 1.0), "hflip": 0.5}
# What the paper leaves open, as the released main.py and its commands have it.
TABLE_1 |= {"smoothing": 0.1, "warmup_lr": 1e-6, "min_lr": 1e-5, "clip_grad": 0.0, "repeat_augment": 1}
TABLE_1 |= {"train_interpolation": "random", "model_ema": True, "model_ema_decay": 0.99992}
STANDARD = TABLE_1 | {"lr": 1e-3 * 1024 / 1024, "mixing": BOTH, "objectives": {"hard": {}}}
RELABEL = TABLE_1 | {"lr": 1e-3 * 1024 / 1024, "mixing": MIXTOKEN, "objectives": {"relabel": {}}}
TOKEN = TABLE_1 | {"lr": 1e-3 * 1024 / 640, "mixing": MIXTOKEN, "objectives": {"token_labeling": {"beta": 0.5}}}
ONLINE = {"teacher": "regnety_160.deit_in1k"}  # section 4.2, "Online Token Labeling"
ONLINE_TOKEN = ONLINE | {"objectives": {"online_token": {"beta": 0.5, "class_target": "truth"}}}  # equation 3
ONLINE_KD = ONLINE | {  # DeiT's main.py: half the truth, half the teacher's choice (alpha 0.5)
    "objectives": {
        "hard": {"weight": 0.5},
        "distillation": {"kind": "hard", "through": "distillation", "weight": 0.5},
    }
}
VOTE = {"token_vote": 0.5}  # of the released evaluation
# Supplement, section 1: 30 epochs, batch 512, 5e-6, 1e-8, "other hyper-parameters the same as default". Down to 0 is
# ours, because the default end, 1e-5, lies above the rate.
FINETUNE = {"epochs": 30, "batch": 512, "lr": 5e-6, "weight_decay": 1e-8, "min_lr": 0.0}
S = {"model": "lvvit_s"}
M = {"model": "lvvit_m", "drop_path": 0.2}  # supplement, Table 5
L = {"model": "lvvit_l", "drop_path": 0.3, "aa": RANDAUGMENT_3}  # the released command

LVVIT = {
    "lvvit_t_token": TOKEN | VOTE | {"model": "lvvit_t"},  # Table 1, as the next three
    "lvvit_s_token": TOKEN | VOTE | S,
    "lvvit_m_token": TOKEN | VOTE | M,
    "lvvit_l_token": TOKEN | VOTE | L | {"img_size": 288},
    "lvvit_s_relabel": RELABEL | S,  # Table 2, as the next
    "lvvit_s_standard": STANDARD | S,
    "lvvit_s_online_token": TOKEN | VOTE | S | ONLINE_TOKEN,  # Table 4, as the next two
    "lvvit_s_online_kd": STANDARD | ONLINE_KD | {"model": "lvvit_s_distilled"},
    "deit_small_online_token": TOKEN | ONLINE_TOKEN | {"model": "deit_small_patch16_224"},
    "deit_tiny_token": TOKEN | {"model": "deit_tiny_patch16_224"},  # Figure 5, as the next five
    "deit_small_token": TOKEN | {"model": "deit_small_patch16_224"},
    "deit_base_token": TOKEN | {"model": "deit_base_patch16_224"},
    "t2t_vit_14_token": TOKEN | {"model": "t2t_vit_14"},
    "t2t_vit_19_token": TOKEN | {"model": "t2t_vit_19"},
    "t2t_vit_24_token": TOKEN | {"model": "t2t_vit_24"},
    "mixer_small_token": TOKEN | {"model": "mixer_s16_224"},  # Table 5, as the next three
    "mixer_base_token": TOKEN | {"model": "mixer_b16_224"},
    "mixer_large_token": TOKEN | {"model": "mixer_l16_224"},
    "resnest50_token": TOKEN | {"model": "resnest50d", "mixing": CUTMIX},  # no patch embedding to mix behind
    "finetune_lvvit_s_384": TOKEN | VOTE | S | FINETUNE | {"img_size": 384},  # Table 6, test sizes
    "finetune_lvvit_m_384": TOKEN | VOTE | M | FINETUNE | {"img_size": 384},
    "finetune_lvvit_m_448": TOKEN | VOTE | M | FINETUNE | {"img_size": 448},  # the released page
    "finetune_lvvit_l_448": TOKEN | VOTE | L | FINETUNE | {"img_size": 448},
    "finetune_lvvit_l_512": TOKEN | VOTE | L | FINETUNE | {"img_size": 512},
    # the same section, for any weights; the rate does not follow the batch: ours
    "finetune_resolution": {"epochs": 30, "batch": 512, "processes": 4, "lr": 5e-6, "rule": "constant", "opt": "adamw"}
    | {"weight_decay": 1e-8, "warmup_epochs": 0, "warmup_lr": 5e-6, "min_lr": 5e-6},
}

# DeiT's main.py and samplers.py (three views of an image). It adds 10 epochs of cool-down to the schedule and stops
# before them, after 300.
DEIT = {"epochs": 300, "batch": 1024, "processes": 8, "opt": "adamw", "sched": "cosine", "rule": "linear"}
DEIT |= {"lr": 5e-4 * 1024 / 512, "weight_decay": 0.05, "warmup_epochs": 5, "warmup_lr": 1e-6, "min_lr": 1e-5}
DEIT |= {"drop": 0.0, "drop_path": 0.1, "smoothing": 0.1, "repeat_augment": 3, "aa": RANDAUGMENT, "reprob": 0.25}
DEIT |= {"mixing": BOTH, "clip_grad": 0.0, "train_interpolation": "bicubic", "model_ema": False, "img_size": 224}
DEIT |= {"scale": (0.08, 1.0), "hflip": 0.5}
# Swin's config.py, main.py and configs (stochastic depth 0.2, 0.3, 0.5 for T, S, B); batch 128 on each of 8 GPUs. The
# first rate of warm-up and the last rate, 5e-7 and 5e-6, belong to a batch of 512 and are scaled like the peak, 5e-4.
SWIN = DEIT | {"lr": 5e-4 * 1024 / 512, "warmup_epochs": 20, "clip_grad": 5.0, "repeat_augment": 1}
SWIN |= {"warmup_lr": 5e-7 * 1024 / 512, "min_lr": 5e-6 * 1024 / 512}
# TL-Align, section 4.1: tiny and small models 300 epochs "following the same training recipe"; Table 7: CutMix alone.
ALIGN = {"objectives": {"tl_align": {}}, "mixing": CUTMIX}
# The same section, large models: the official weights, 40 epochs, constant 1e-5, weight decay 1e-8. Batch, and no
# repeated augmentation: ours.
ALIGN_LARGE = ALIGN | {"epochs": 40, "batch": 512, "lr": 1e-5, "rule": "constant", "weight_decay": 1e-8}
ALIGN_LARGE |= {"warmup_epochs": 0, "warmup_lr": 1e-5, "min_lr": 1e-5, "repeat_augment": 1, "weights": "timm"}
# Section 4.2 and Table 5, "following existing works": DeiT's authors on their page for CIFAR-10 and Cars: SGD, batch
# 768, 0.01, 1e-4, 1000 epochs, neither erasing nor stochastic depth, all else as on ImageNet.
TRANSFER = DEIT | {"epochs": 1000, "batch": 768, "lr": 0.01, "opt": "sgd", "weight_decay": 1e-4, "reprob": 0.0}
TRANSFER |= {"drop_path": 0.0, "model": "deit_small_patch16_224", "objectives": {"hard": {}}}

TL_ALIGN = {
    "deit_tiny_align": DEIT | ALIGN | {"model": "deit_tiny_patch16_224"},
    "deit_small_align": DEIT | ALIGN | {"model": "deit_small_patch16_224"},
    "deit_base_align": DEIT | ALIGN_LARGE | {"model": "deit_base_patch16_224.fb_in1k"},
    "swin_tiny_align": SWIN | ALIGN | {"model": "swin_tiny_patch4_window7_224", "drop_path": 0.2},
    "swin_small_align": SWIN | ALIGN | {"model": "swin_small_patch4_window7_224", "drop_path": 0.3},
    "swin_base_align": SWIN | ALIGN_LARGE | {"model": "swin_base_patch4_window7_224.ms_in1k", "drop_path": 0.5},
    **{f"transfer_{data}": TRANSFER for data in ("cifar10", "cifar100", "cars", "flowers")},
    # All Tokens Matter, Table 4, whose number is DeiT's own
    "deit_small_online_kd": DEIT | ONLINE_KD | {"model": "deit_small_distilled_patch16_224"},
}

# drloc, supplement, section 6: 100 epochs, AdamW, cosine, 20 warm-up epochs (fine-tuning: 10), batch 1024, 1e-3 (5e-4),
# 0.05, 224 pixels; "the training framework released by the authors of Swin" for the rest. λ: ViT-B's of section 3, the
# released commands' for Swin, T2T-ViT and CvT; nobody says ResNet-50's.
DRLOC = SWIN | {"epochs": 100, "mixing": BOTH}
DRLOC_FINETUNE = {"epochs": 100, "batch": 1024, "opt": "adamw", "lr": 5e-4, "weight_decay": 0.05, "warmup_epochs": 10}

SMALL_DATA = {
    "swin_tiny_drloc": DRLOC | {"model": "swin_tiny_patch4_window7_224", "drop_path": 0.2},  # Swin's
    "t2t_vit_14_drloc": DRLOC
    | {"model": "t2t_vit_14", "drop_path": 0.0},  # the released networks have none; as the next
    "resnet50_drloc": DRLOC | {"model": "resnet50", "drop_path": 0.0},
    "cvt_13_drloc": DRLOC | {"model": "cvt_13", "drop_path": 0.1},  # ours; the released port has none, as the next
    "vit_base_drloc": DRLOC | {"model": "vit_base_patch16_224", "drop_path": 0.1},
    "finetune_swin_tiny_drloc": DRLOC
    | DRLOC_FINETUNE
    | {"model": "swin_tiny_patch4_window7_224.ms_in1k", "weights": "timm", "drop_path": 0.2},
    # the same settings for any weights; the square root: ours
    "finetune": DRLOC_FINETUNE | {"processes": 8, "rule": "sqrt"},
}
LAMBDAS = {"swin_tiny": 0.5, "t2t_vit_14": 0.1, "resnet50": 0.1, "cvt_13": 0.1, "vit_base": 0.01}
for network, weight in (LAMBDAS | {"finetune_swin_tiny": 0.5}).items():
    SMALL_DATA[f"{network}_drloc"] |= {"objectives": {"hard": {}, "drloc": {"weight": weight}}}

# ADE20K. All Tokens Matter, section 4.4 (AdamW, 6e-5, 0.01, linear down to 5e-6, batch 16, 512 pixels, test scales) and
# drloc, supplement, section 4.2 (the same, 160,000 updates, 1,500 of warm-up, scales 0.5 to 2, stochastic depth 0.2,
# test scales); mmsegmentation files of Swin and of LV-ViT: warm-up from a millionth, heads, and Swin's last rate 0.
ADE20K = {"iters": 160_000, "batch": 16, "processes": 1, "opt": "adamw", "lr": 6e-5, "rule": "constant"}
ADE20K |= {"weight_decay": 0.01, "sched": "linear", "warmup_iters": 1500, "warmup_lr": 6e-5 * 1e-6, "val_iters": 8000}
ADE20K |= {"crop_size": 512, "scale": (0.5, 2.0), "hflip": 0.5, "photometric": True, "head": "upernet"}
ADE20K_LVVIT = ADE20K | {"min_lr": 5e-6, "test_scales": (0.75, 1.0, 1.25, 1.5, 1.75), "mode": "slide", "stride": 341}
ADE20K_LVVIT |= {"channels": 256}
ADE20K_SWIN = ADE20K | {"min_lr": 0.0, "test_scales": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), "channels": 512}
# COCO. drloc, supplement, section 4.1: short side 480 to 800, long side up to 1333, AdamW, 1e-4, 0.05, batch 16, 12
# epochs, a tenth after 8 and 11; TL-Align, section 4.2: the 3x schedule. Swin's mmdetection files for the rest:
# stochastic depth, warm-up of 500 updates from a thousandth, crops, flips, heads and losses (read in copies of them).
COCO = {"batch": 16, "processes": 1, "opt": "adamw", "lr": 1e-4, "rule": "constant", "weight_decay": 0.05}
COCO |= {"sched": "multistep", "decay_rate": 0.1, "warmup_iters": 500, "warmup_lr": 1e-4 * 1e-3, "longest": 1333}
COCO |= {"sizes": (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800), "hflip": 0.5, "crop": 0.5}
ONE, THREE = ({"epochs": 12, "decay_milestones": (8, 11)}, {"epochs": 36, "decay_milestones": (27, 33)})
MASK = COCO | {"detector": "mask"}
CASCADE = COCO | {"detector": "cascade"}
TINY, SMALL, BASE = ({"model": f"swin_{size}_patch4_window7_224.ms_in1k"} for size in ("tiny", "small", "base"))

DENSE = {
    "segment_lvvit_s_fcn": ADE20K_LVVIT | S | {"head": "fcn", "drop_path": 0.1, "convs": 2},  # head not released: ours
    "segment_lvvit_s_upernet": ADE20K_LVVIT | S | {"drop_path": 0.1},
    "segment_lvvit_m_upernet": ADE20K_LVVIT | M | {"drop_path": 0.2},
    "segment_lvvit_l_upernet": ADE20K_LVVIT
    | {"model": "lvvit_l", "drop_path": 0.5, "channels": 512, "aux_channels": 512},
    "segment_deit_small_upernet": ADE20K_SWIN  # mmsegmentation's DeiT-S
    | {"model": "deit_small_patch16_224.fb_in1k", "drop_path": 0.1, "neck": "interpolated"},
    "segment_swin_tiny_upernet": ADE20K_SWIN | TINY | {"drop_path": 0.2},
    "segment_swin_small_upernet": ADE20K_SWIN | SMALL | {"drop_path": 0.3},
    "segment_swin_base_upernet": ADE20K_SWIN | BASE | {"drop_path": 0.3},
    "detect_swin_tiny_mask_1x": MASK | ONE | TINY | {"drop_path": 0.1},
    "detect_swin_tiny_mask_3x": MASK | THREE | TINY | {"drop_path": 0.2},
    "detect_swin_tiny_cascade_1x": CASCADE | ONE | TINY | {"drop_path": 0.0},
    "detect_swin_tiny_cascade_3x": CASCADE | THREE | TINY | {"drop_path": 0.2},
    "detect_swin_small_cascade_3x": CASCADE | THREE | SMALL | {"drop_path": 0.2},
    "detect_swin_base_cascade_3x": CASCADE | THREE | BASE | {"drop_path": 0.3},
}

TABLE = LVVIT | TL_ALIGN | SMALL_DATA | DENSE


def options_of(name):
    kind = {"segment": SegmentOptions, "detect": DetectOptions}.get(name.split("_")[0], TrainOptions)
    return apply(kind(), read_recipe(name), name)


def test_every_recipe_has_a_row_or_is_said_to_be_ours():
    assert not set(TABLE) & OURS
    assert set(recipe_names()) == set(TABLE) | OURS


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_has_the_papers_numbers(name):
    row, options = dict(TABLE[name]), options_of(name)
    optim, batch = options.optim, row.pop("batch")
    processes, lr, rule = (row.pop(key) for key in ("processes", "lr", "rule"))
    sizes = {"constant": 1.0, "linear": 0.5, "sqrt": 0.5**0.5}
    assert options.dataset.batch_size * processes == batch
    assert learning_rate(optim, batch) == pytest.approx(lr)
    assert learning_rate(optim, batch // 2) == pytest.approx(lr * sizes[rule])
    values = flat(options)
    found = {key: tuple(values[key]) if isinstance(values[key], list) else values[key] for key in row}
    assert found == {key: pytest.approx(value) if isinstance(value, float) else value for key, value in row.items()}
    rates = {"batch_size", "lr", "lr_base", "lr_base_size", "lr_scaling"}
    assert set(read_recipe(name)) <= set(row) | rates | SPEED  # what it sets, the table knows


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_trains_as_long_as_the_paper_and_one_epoch_if_told_so(name):
    row, optim = TABLE[name], options_of(name).optim
    for epochs, chosen in ((row.get("epochs"), optim), (1, replace(optim, epochs=1))):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=row["lr"])
        schedule, updates = build_schedule(optimizer, chosen, updates_per_epoch=7)
        assert updates == row.get("iters", 7 * (epochs or 0))
    if "min_lr" in row:
        schedule.step_update(updates)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(row["min_lr"], abs=1e-12)
