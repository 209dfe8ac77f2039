"""Small images made here, tiny networks with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from everytoken.data.batch import normalise
from everytoken.keyed import generator
from everytoken_lab.annotators.annotator import build_annotator
from everytoken_lab.data.datasets import open_dataset

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40)}


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums round differently with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_photos(root: Path, per_class: int = 4, size: tuple[int, int] = (48, 36), colours=COLOURS) -> Path:
    """A folder per colour; noisy images of that colour, as PNG."""
    for name, colour in colours.items():
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            noise = generator(0, name, number).normal(0, 30, (size[1], size[0], 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.{name}.png")
    return root


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos")


@pytest.fixture
def photos_of(tmp_path):
    """photos_of(per_class=..., colours=...): another such folder."""
    return lambda **more: make_photos(tmp_path / "others", **more)


@pytest.fixture(scope="session")
def content():
    """content(folder): all files of a store that must be equal in equal stores."""
    return lambda folder: {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".")}


@pytest.fixture
def data(photos):
    return open_dataset(photos)


@pytest.fixture(scope="session")
def network_input():
    """network_input(transform, picture): float32 [1, 3, H, W]."""

    def make(transform, picture):
        pixels = torch.from_numpy(transform(picture)[0])[None].permute(0, 3, 1, 2)
        return normalise(pixels, transform.mean, transform.std, channels_last=True)

    return make


@pytest.fixture
def network(weights):
    return build_annotator("timm:test_resnet", (64, 64), str(weights("test_resnet")))


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """weights(name, classes): a file with random weights of a timm model."""
    folder = tmp_path_factory.mktemp("weights")

    def make(name: str, classes: int = 3) -> Path:
        path = folder / f"{name}-{classes}.safetensors"
        if not path.exists():
            with torch.random.fork_rng([]):
                torch.manual_seed(1)
                model = timm.create_model(name, num_classes=classes)
                for parameter in model.parameters():  # zero-initialised layers would hide mistakes
                    torch.nn.init.normal_(parameter, 0.05, 0.15)
                for part in model.modules():  # statistics of real activations, or signals die on the way
                    if isinstance(part, torch.nn.BatchNorm2d):
                        part.momentum = None
                with torch.no_grad():
                    model.train()(torch.randn(8, 3, *model.pretrained_cfg["input_size"][1:]))
            save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path)
        return path

    return make
