"""Detection, evaluation, validation and annotation on a GPU that is not there: the CPU's results, and counted waits."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import BatchNormAct2d
from torch import nn

from everytoken.data.batch import Batch, to_device
from everytoken.models import TokenModel
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.annotators.annotator import Annotator, CellScores
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.dense import common as dense
from everytoken_lab.dense.backbone import Features
from everytoken_lab.dense.detect import DetectorOptions, FindOptions
from everytoken_lab.dense.detect.data import BatchObjects, Objects
from everytoken_lab.dense.detect.model import Detector, DetectorInfo
from everytoken_lab.dense.detect.task import Inference
from everytoken_lab.dense.segment import DecoderOptions
from everytoken_lab.dense.segment.model import Segmenter
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.options import DataOptions, ModelOptions, OptimOptions, RunOptions, TrainOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.evaluation.run import evaluate
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import open_model
from everytoken_lab.training.build import build, complete
from everytoken_lab.training.classify import Classification
from tests.engine.pretend_gpu import CUDA, PretendGpu

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="the stand-in was not tried with torch 2.9"
)
MEAN, STD = (0.5,) * 3, (0.25,) * 3
CPU = World(0, 1, torch.device("cpu"))


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture(autouse=True)
def _cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: Stream())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream())
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


# -- detection --------------------------------------------------------------------------------------------------------


def photos_with_objects():
    """Two images, with two objects and one."""
    boxes = torch.tensor([[5.0, 5, 40, 50], [30, 20, 90, 80], [10, 10, 60, 30]])
    masks = torch.zeros(3, 96, 96, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    sizes = ((96, 96), (80, 96))
    parts = zip(*(values.split((2, 1)) for values in (boxes, torch.tensor([1, 2, 3]), masks)), sizes, strict=True)
    objects = BatchObjects(Objects(*tensors, size, np.eye(2, 3), size) for *tensors, size in parts)
    images = torch.randint(0, 255, (2, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Batch(images, targets=objects)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        # nonzero, for each of two images: torchvision's proposals 2 and samplers 4, what was sampled 1, regions with
        # masks 1; for both together: anchors 2, regions with boxes 1. To the host: how many regions each level has
        ("mask", {"nonzero": 19, "nms": 2, "to the host": 2, "to the GPU": 6}),
        # with three stages; between them, true boxes that were added are taken away again (by bools); torchvision's
        # GIoU loss indexes by 5 bools and moves 1 constant per stage
        ("cascade", {"nonzero": 37, "index by bools": 19, "nms": 2, "to the host": 6, "to the GPU": 15}),
    ],
)
def test_a_detection_step_on_a_gpu_has_the_losses_of_the_cpu_and_waits_as_often_as_it_says(kind, waits):
    """What is left are shapes that depend on values, and constants that torchvision makes on the way."""
    torch.manual_seed(0)
    options = DetectorOptions(detector=kind, channels=16, hidden=32, proposals=50, regions=32)
    step = dense.DenseStep(Detector(Features(timm.create_model("test_convnext2")), options, 3)).train()
    batch, find = photos_with_objects(), FindOptions(score_thresh=0.01, nms_thresh=0.5, max_detections=5)
    info = DetectorInfo(Description("", {}, mean=MEAN, std=STD), (), options, find)
    photo = Batch(batch.images[:1], targets=BatchObjects(batch.targets[:1]))
    found = Inference(deepcopy(step.network).eval(), info)(photo)
    torch.manual_seed(5)
    terms = deepcopy(step)(to_device(batch, "cpu", MEAN, STD))
    wanted = {name: float(term.detach()) for name, term in terms.items()}
    with PretendGpu() as gpu:
        again = Inference(step.to(CUDA).network.eval(), info)(photo)
        step.train()
        gpu.waits.clear()
        torch.manual_seed(5)
        terms = step(to_device(batch, CUDA, MEAN, STD))
        assert +gpu.waits == waits
        assert {term.device for term in terms.values()} == {CUDA}
        assert {name: float(term.detach()) for name, term in terms.items()} == wanted
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(to_device(batch, CUDA, MEAN, STD))["loss"]
        assert float(loss.detach()) == pytest.approx(wanted["loss"], rel=0.1)
    assert len(found.scores) == 5
    np.testing.assert_array_equal(found.boxes, again.boxes)
    assert found.masks == again.masks


@pytest.mark.parametrize("size", [2, 1])
def test_many_gpus_share_the_statistics_of_batch_norms_and_timms_norms_keep_their_activations(monkeypatch, size):
    class Reached(Exception):  # noqa: N818
        pass

    def stop(self, module, options, world, folder):
        raise Reached(module)

    monkeypatch.setattr(dense.Task, "__init__", stop)
    decoder = DecoderOptions(channels=8, aux_channels=8, pyramid_channels=16)
    network = Segmenter(Features(timm.create_model("test_efficientnet")), decoder, 3).eval()
    images, names = torch.randn(1, 3, 64, 64), [f"network.{name}" for name in network.state_dict()]
    wanted, norms = network(images), [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert any(isinstance(norm, BatchNormAct2d) for norm in norms)
    options = replace(TrainOptions(), run=RunOptions())
    with pytest.raises(Reached) as reached:
        dense.DenseTask(network, None, (), options, World(0, size, CUDA), None)
    module = reached.value.args[0]
    shared = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert len(shared) == (len(norms) if size > 1 else 0)
    assert list(module.state_dict()) == names
    assert torch.equal(module.eval().network(images), wanted)  # torch's own conversion drops activations


# -- evaluation and validation ----------------------------------------------------------------------------------------


def test_an_evaluation_on_a_gpu_has_the_numbers_of_the_cpu_and_waits_when_answers_leave_it(photos, tmp_path):
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet").state_dict(), tmp_path / "w.safetensors")
    opened = open_model(tmp_path / "w.safetensors", architecture="test_efficientnet", img_size=32)
    opened.model.backbone.reset_classifier(3)
    classes = ClassList(3, ("class-0", "class-1", "class-2"))
    opened = replace(opened, classes=classes)
    options = {"batch_size": 5, "workers": 0}
    numbers = [evaluate(opened, photos, device="cpu", calibrates=True, **options)]
    with PretendGpu() as gpu:
        opened.model.to(CUDA)
        gpu.waits.clear()
        numbers.append(evaluate(opened, photos, device="cuda", calibrates=True, **options))
        # of three batches: five tensors and, to calibrate, four; the first copy waits for the network
        assert +gpu.waits == {"to the GPU": 1, "to the host": 3 * 9}  # the class of each folder, once
        gpu.waits.clear()
        evaluate(opened, photos, device="cuda", amp=True, **options)
        assert +gpu.waits == {"to the GPU": 1, "to the host": 3 * 5}
    one, two = numbers
    np.testing.assert_array_equal(one.predictions.loss, two.predictions.loss)
    assert one.calibration == two.calibration


@pytest.mark.parametrize("channels_last", [False, True])
def test_validation_while_training_on_a_gpu_runs_under_autocast_and_waits_when_answers_leave_it(
    photos, tmp_path, channels_last
):
    seen = []

    def validate(world, amp):
        options = complete(
            TrainOptions(
                data=str(photos),
                model=ModelOptions(model="test_efficientnet", img_size=32, channels_last=channels_last),
                dataset=DataOptions(batch_size=5, workers=0),
                optim=OptimOptions(amp=amp),
                run=RunOptions(device=world.device.type),
                objectives={"hard": {}},
            )
        )
        torch.manual_seed(0)
        task = Classification(build(options, world), options, world, RunFolder(tmp_path, writable=False))
        task.backbone.conv_stem.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
        if isinstance(gpu, PretendGpu):
            gpu.waits.clear()
        with torch.no_grad():
            return task.validate(task.module.eval())

    with nullcontext() as gpu:
        wanted = validate(CPU, amp=False)
    with PretendGpu() as gpu:
        assert validate(replace(CPU, device=CUDA), amp=False) == wanted
        seen.clear()
        validate(replace(CPU, device=CUDA), amp=True)
        assert +gpu.waits == {"to the host": 3 * 5}
    images, out = seen[-1]
    assert images.device == CUDA
    assert out.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last


# -- annotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [False, True])
def test_annotation_on_a_gpu_fills_the_store_of_the_cpu_and_only_the_writing_thread_waits(photos, tmp_path, amp):
    torch.manual_seed(0)
    names = ("class-2", "cat", "class-0", "dog", "class-1", "class-1 too")
    network = CellScores(TokenModel(timm.create_model("test_efficientnet", num_classes=len(names))))
    (tmp_path / "map.csv").write_text("class-0,class-0\nclass-1,class-1\nclass-1,class-1 too\nclass-2,class-2\n")
    data = open_dataset(photos, "val")
    options = AnnotateOptions(batch_size=5, workers=0, class_map=str(tmp_path / "map.csv"), amp=amp)

    def fill(folder, world):
        annotator = Annotator("test", EvalTransform((64, 64)), ClassList(len(names), names), {}, network)
        fill_store(data, tmp_path / folder, annotator, options, world)
        return {p.name: p.read_bytes() for p in (tmp_path / folder).iterdir() if p.suffix != ".jsonl"}

    wanted = fill("cpu", CPU)
    with PretendGpu() as gpu:
        got = fill("gpu", replace(CPU, device=CUDA))
    moved = len(network.state_dict())
    assert +gpu.waits == {"to the GPU": moved, "to the host": 3 * 2}  # scores and classes of three batches
    assert got.keys() == wanted.keys()
    assert amp or got == wanted
