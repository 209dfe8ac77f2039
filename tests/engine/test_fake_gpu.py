"""Training steps on a GPU that is not there: fake CUDA tensors have shapes and devices, and no values.

A step that mixes devices fails here, and so does one that asks for a value (`.item()`, `bool(tensor)`, `nonzero`), for
which a real GPU is waited for. Copies to the GPU that would block are counted by their operators.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from everytoken.data.batch import Batch, to_device
from everytoken.functional import collate_maps
from everytoken.keyed import StepKey
from everytoken.maps import ScoreMap
from everytoken.mixing import MIXERS, build_mixer
from everytoken.mixing.mix import apply_to_pixels
from everytoken.models import TokenModel
from everytoken.objectives import drloc
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher, TokenStep, probe
from everytoken_lab.dense.backbone import Features
from everytoken_lab.dense.common import DenseStep
from everytoken_lab.dense.segment import DecoderOptions
from everytoken_lab.dense.segment.model import Segmenter

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 ends the process at a fake convolution without a GPU"
)
CUDA = torch.device("cuda", 0)
MEAN, STD = (0.5,) * 3, (0.25,) * 3
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}  # of autocast
BATCH, CLASSES = 4, 7
VIT, SWIN, CNN = "vit_nano_patch4_32", "swin_nano_patch4_window6_96", "test_convnext2"
MIXER = "mixer_s16_224"
SETUPS = {
    "hard": (VIT, {"hard": {}}, {}, False),
    "mixup": (VIT, {"hard": {}}, {"mixup": {}}, False),
    "token labels": (VIT, {"token_labeling": {"class_target": "both", "smoothing": 0.1}}, {}, False),
    "token labels, MixToken": ("lvvit_micro_patch4_32", {"token_labeling": {}}, {"mixtoken": {}}, False),
    "relabel": (VIT, {"relabel": {}}, {"cutmix": {}}, False),
    "drloc": (VIT, {"hard": {}, "drloc": {}}, {}, False),
    "drloc, Swin": (SWIN, {"hard": {}, "drloc": {"variant": "ce"}}, {}, False),
    "drloc reg": (VIT, {"hard": {}, "drloc": {"variant": "reg"}}, {}, False),
    "drloc at every level, Swin": (SWIN, {"hard": {}, "drloc": {"variant": "all"}}, {}, False),
    "drloc, signed and within images": (
        VIT,
        {"hard": {}, "drloc": {"variant": "signed", "skip_crossing": True}},
        {"cutmix": {}},
        False,
    ),
    "TL-Align, ViT": (VIT, {"tl_align": {}}, {"cutmix": {}}, False),
    "TL-Align, Swin": (SWIN, {"tl_align": {}}, {"cutmix": {}}, False),
    "TL-Align, ConvNeXt": (CNN, {"tl_align": {}}, {"cutmix": {}}, False),
    "TL-Align, Mixer": (MIXER, {"tl_align": {}}, {"cutmix": {}}, False),
    "TL-Align with token labels": (VIT, {"tl_align": {"beta": 0.5}}, {"mixtoken": {}}, False),
    "TransMix": (VIT, {"transmix": {}}, {"cutmix": {}}, False),
    "distillation": (VIT, {"hard": {}, "distillation": {}}, {}, True),
    "online tokens": (VIT, {"online_token": {}}, {"mixtoken": {}}, True),
}


class Watch(TorchDispatchMode):
    """Copies from the host to the device that the host waits for."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.blocking: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        for value in args:
            if isinstance(value, FakeTensor):
                value.constant = None  # small ones know their values, and would be computed really
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device).type == self.device:
            source = args[0]
            if source.device.type == "cpu" and not kwargs.get("non_blocking") and source.numel():
                self.blocking.append(f"{tuple(source.shape)} {source.dtype}")
        return func(*args, **kwargs)


def host_batch(size):
    """What the loader yields, with rotated images too."""
    rng = np.random.default_rng(0)
    maps = collate_maps(
        [ScoreMap.from_logits(rng.normal(0, 2, (6, 5, CLASSES)), 3, (40, 36)) for _ in range(BATCH)], CLASSES
    )
    placement = torch.tensor([[[0.6, 0.0, 0.1], [0.0, 0.5, 0.2]], [[0.5, 0.1, 0.2], [-0.1, 0.5, 0.3]]]).repeat(2, 1, 1)
    images = torch.zeros(BATCH, 3, size, size, dtype=torch.uint8)
    return Batch(images, torch.arange(BATCH) % CLASSES, placement=placement, maps=maps, key=StepKey(1, 2))


def make_step(name, objectives, mixing, with_teacher, **more):
    """(step, side of its images)"""
    size, more = 96 if name == SWIN else 32, {"img_size": 32} | more if name == MIXER else more
    model = TokenModel(timm.create_model(name, num_classes=CLASSES, **more), token_classes=CLASSES)
    teacher = None
    if with_teacher:
        network = TokenModel(timm.create_model("test_efficientnet", num_classes=CLASSES))
        teacher = FrozenTeacher(network, (MEAN, STD), ((0.4,) * 3, (0.2,) * 3))
    settings = {name: dict(given) for name, given in objectives.items()}
    step = TokenStep(model, build_objectives(settings, model), build_mixer(mixing), teacher).train()
    step.grid = probe(model, (size, size), 3)
    return step, size


def build(setup, device):
    """(step, batch on the host), the step with fake weights on a device."""
    step, size = make_step(*setup)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(step, device)
        if (teacher := step.teacher) is not None:
            move(teacher.model, device)
            teacher.scale, teacher.shift = (torch.ones(1, 3, 1, 1, device=device) for _ in range(2))
    return step, host_batch(size).plan(step.grid)


def move(module, device):
    """`module.to(device)`, which wants a driver."""
    for part in module.modules():
        for name, value in part.named_parameters(recurse=False):
            weight = torch.empty(value.shape, dtype=value.dtype, device=device)
            setattr(part, name, nn.Parameter(weight, value.requires_grad))
        for name, value in part.named_buffers(recurse=False):
            part.register_buffer(name, torch.empty(value.shape, dtype=value.dtype, device=device))


def run(setup, device, dtype, backward):
    """One step; the copies that would block."""
    step, batch = build(setup, device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = replace(
        batch,
        images=mode.from_tensor(batch.images),
        labels=mode.from_tensor(batch.labels),
        placement=mode.from_tensor(batch.placement),
        maps=batch.maps.apply(mode.from_tensor),
    )
    with mode, Watch(device.type) as watch:
        batch = to_device(batch, device, MEAN, STD)
        with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
            result = step(batch)
        if backward:
            result["loss"].backward()
        if dtype is not None:
            assert result["output"].dtype == dtype
        assert result["loss"].device == step.eval()(batch)["output"].device == device
    if backward:
        assert {p.grad.device for p in step.parameters() if p.grad is not None} == {device}
    return watch.blocking


def without_generators(device):
    """What stands in for random numbers from a generator on the device, which wants a driver: (place, name, value)."""

    def random_pairs(batch, count, grid, generator):
        positions = torch.randint(grid[0] * grid[1], (2, batch, count), device=device)
        return positions[0], positions[1]

    return [
        (StepKey, "torch_generator", lambda self, purpose, device=None: None),
        (drloc.fn, "random_pairs", random_pairs),
    ]


@pytest.fixture(autouse=True)
def _cuda(monkeypatch):
    for replacement in without_generators(CUDA):
        monkeypatch.setattr(*replacement)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)


@pytest.mark.parametrize("name", SETUPS)
def test_a_step_stays_on_the_gpu_and_the_host_does_not_wait(name):
    for dtype in DTYPES.values():
        assert run(SETUPS[name], CUDA, dtype, backward=False) == []


@pytest.mark.parametrize("name", sorted(set(MIXERS) - {"mixtoken", "cutmix", "mixup"}))
def test_mixing_stays_on_the_gpu_and_the_host_does_not_wait(name):
    """Masks that are drawn by the host arrive without a wait; those that look at the images stay where these are."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mixer, rng = MIXERS[name](), np.random.default_rng(0)
    with mode, Watch("cuda") as watch:
        images = torch.empty(BATCH, 3, 32, 32, device=CUDA)
        places = torch.empty(BATCH, 8, 8, device=CUDA)
        mix = mixer.draw(BATCH, (32, 32), (8, 8), rng, CUDA, lambda kind: places)
        mixed = apply_to_pixels(images, mix) if mix.level == "pixels" else images
        assert mixed.device == mix.mask.device == mix.ratio.device == CUDA
    assert watch.blocking == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_segmentation_step_stays_on_the_gpu_and_the_host_does_not_wait(dtype):
    features = Features(timm.create_model("test_convnext2"))
    decoder = DecoderOptions(channels=8, aux_channels=8, pyramid_channels=16)
    step = DenseStep(Segmenter(features, decoder, 3)).train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        move(step, CUDA)
    with mode, Watch("cuda") as watch:
        batch = Batch(
            torch.empty(2, 3, 64, 64, device=CUDA), targets=torch.zeros(2, 64, 64, dtype=torch.int16, device=CUDA)
        )
        with torch.autocast("cuda", DTYPES[dtype]) if DTYPES[dtype] is not None else nullcontext():
            terms = step(batch)
        assert {term.device for term in terms.values()} == {CUDA}
    assert watch.blocking == []


def run_backward(results):
    """Forward and backward of every set-up on a device that is registered from Python; for the whole process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fakegpu")
    torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    device = torch.device("fakegpu", 0)
    for replacement in without_generators(device):
        setattr(*replacement)
    for name, setup in SETUPS.items():
        try:
            run(setup, device, None, backward=True)
        except Exception as error:
            results.put(f"{name}: {type(error).__name__}: {error}")
    results.put("")


def test_no_backward_pass_asks_for_values_or_leaves_the_gpu(forkserver):
    results = forkserver.Queue()
    process = forkserver.Process(target=run_backward, args=(results,))
    process.start()
    problems = list(iter(results.get, ""))
    process.join()
    assert problems == []
