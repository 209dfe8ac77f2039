import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageDataset, RandomResizedCropAndInterpolation
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from everytoken.data import placement as pl
from everytoken.data import randaugment
from everytoken.data.adapter import PipelineError, RandAugment, _follow, collate, with_maps
from everytoken.functional import label_tokens
from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.data.loader import Loader

SIZE = 112
BILINEAR = v2.InterpolationMode.BILINEAR
PIPELINE = v2.Compose(
    [v2.ToImage(), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
)


def marked(rng, width, height):
    """An image with one soft spot in each channel, and the spots' centres in fractions."""
    centres = rng.uniform(0.25, 0.75, (3, 2))
    y, x = np.mgrid[:height, :width] + 0.5
    sigma = min(width, height) / 25
    spots = [np.exp(-((x - u * width) ** 2 + (y - v * height) ** 2) / (2 * sigma**2)) for u, v in centres]
    return Image.fromarray((255 * np.stack(spots, axis=-1)).round().astype(np.uint8)), centres


def find_spots(pixels):
    """Each channel's mean brightness, and its centre of mass in fractions."""
    height, width = pixels.shape[:2]
    y, x = (np.mgrid[:height, :width] + 0.5) / np.array([height, width])[:, None, None]
    weight = pixels.astype(np.float64).reshape(-1, 3)
    total = weight.sum(0).clip(1e-9)
    return weight.mean(0), np.stack([weight.T @ x.ravel() / total, weight.T @ y.ravel() / total], axis=1)


def moves(augment):
    """RandAugment without the colours, which would move a spot's centre of mass."""
    augment.parsed = replace(augment.parsed, names=randaugment.GEOMETRIC)
    return augment


def random_pipeline(rng):
    """A chain of random torchvision transforms that ends at a fixed size."""
    pieces = [
        lambda: v2.RandomResizedCrop((int(rng.integers(100, 200)), int(rng.integers(100, 200))), scale=(0.3, 1)),
        lambda: v2.Resize(int(rng.integers(100, 240))),
        lambda: v2.Resize(int(rng.integers(100, 200)), max_size=260),
        lambda: v2.Resize((int(rng.integers(100, 240)), int(rng.integers(100, 240)))),
        lambda: v2.CenterCrop((int(rng.integers(100, 300)), int(rng.integers(100, 300)))),
        lambda: v2.RandomCrop((150, 170), padding=12, pad_if_needed=True),
        lambda: v2.Pad([3, 17, 8, 0]),
        lambda: v2.RandomHorizontalFlip(0.7),
        lambda: v2.RandomVerticalFlip(0.7),
        lambda: v2.RandomRotation(40, BILINEAR, center=[60, 90] if rng.random() < 0.3 else None),
        lambda: v2.RandomAffine(25, (0.1, 0.1), (0.8, 1.3), (-15, 15, -10, 10), BILINEAR),
        lambda: v2.RandomZoomOut(side_range=(1, 1.6)),
        lambda: v2.ScaleJitter((200, 200), (0.7, 1.3)),
        lambda: v2.RandomShortestSize([120, 180], max_size=300),
        lambda: v2.RandomApply([v2.Resize((130, 160)), v2.RandomHorizontalFlip(1)], p=0.5),
        lambda: moves(RandAugment("rand-m9-n2-p1", fill=0)),
    ]  # fmt: skip
    steps = [pieces[i]() for i in rng.choice(len(pieces), size=int(rng.integers(1, 5)), replace=False)]
    if rng.random() < 0.3:
        steps.insert(0, v2.RandomRotation(40, BILINEAR, expand=True))
    if rng.random() < 0.5:
        steps.insert(int(rng.integers(0, len(steps) + 1)), v2.ToImage())
    return v2.Compose([*steps, v2.Resize((SIZE, SIZE)), v2.ToImage()])


def test_pixels_and_placement_agree_in_200_random_pipelines():
    rng, errors = np.random.default_rng(0), []
    for seed in range(200):
        width, height = rng.integers(150, 320, 2)
        image, centres = marked(rng, int(width), int(height))
        before, _ = find_spots(np.asarray(image))
        torch.manual_seed(seed)
        pixels, placement = _follow(random_pipeline(rng), image)
        after, found = find_spots(pixels.permute(1, 2, 0).numpy())
        # a spot that was cut at some border on the way is darker than its size says
        whole = np.abs(after * abs(np.linalg.det(placement[:, :2])) / before - 1) < 0.01
        errors += list(np.abs(found - pl.apply(pl.invert(placement), centres))[whole].max(-1) * 14)
    assert len(errors) > 250
    assert max(errors) < 0.05  # cells of a 14 x 14 grid


def write_maps(path, sizes, class_names=()):
    """A store of random maps for images of these (width, height)."""
    rng, classes = np.random.default_rng(1), len(class_names) or 20
    meta = StoreMeta(grid=(6, 5), top_k=min(3, classes), num_classes=classes, class_names=class_names)
    with MapWriter(path, sizes, meta) as writer:
        for key in sorted(sizes):
            writer.write({key: ScoreMap.from_logits(rng.normal(2, 3, (6, 5, classes)), meta.top_k, sizes[key])})
        writer.finalize()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """12 photos of several proportions in two classes, one of them lying on its side, and a store of their maps."""
    root = tmp_path_factory.mktemp("adapter")
    rng, sizes = np.random.default_rng(0), {}
    for i in range(12):
        key = f"{'cat' if i < 6 else 'dog'}/{i:02d}.{'png' if i == 3 else 'jpg'}"
        path = root / "photos" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = (60 + 4 * i, 50)
        image = Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8))
        exif = Image.Exif()
        if i == 7:
            exif[0x0112], (width, height) = 6, (height, width)
        if i == 2:
            image = image.convert("L")
        image.save(path, exif=exif)
        sizes[key] = (width, height)
    write_maps(root / "maps", sizes)
    return root


@pytest.fixture(scope="module")
def photos(folder):
    return ImageFolder(folder / "photos")


@pytest.fixture(scope="module")
def maps(folder):
    return Maps(folder / "maps")


class FixedCrop(v2.Transform):
    """Always the same crop, mirrored."""

    def transform(self, inpt, params):
        return F.horizontal_flip(F.resized_crop(inpt, 5, 10, 30, 40, [28, 28]))


def fixed_view(picture, rng):
    """The same crop for our own loader."""
    w, h = picture.size
    placement = pl.compose(pl.from_box(10 / w, 5 / h, 50 / w, 35 / h), pl.hflip())
    return np.zeros((28, 28, 3), np.uint8), placement


def test_targets_through_the_adapter_equal_those_of_our_own_loader(folder, photos, maps):
    data = with_maps(photos, maps, transform=v2.Compose([FixedCrop(), v2.ToImage()]))
    adapted = next(iter(DataLoader(data, 12, collate_fn=collate)))
    own = next(iter(Loader(open_dataset(folder / "photos", "all"), fixed_view, 12, train=False, maps=maps)))
    assert adapted.images.shape == own.images.shape == (12, 3, 28, 28)
    assert type(adapted.images) is torch.Tensor
    assert adapted.keys == own.keys
    assert adapted.labels.tolist() == own.labels.tolist() == [0] * 6 + [1] * 6
    torch.testing.assert_close(adapted.placement, own.placement)
    want, got = (label_tokens(b.maps, b.placement, (7, 7), smoothing=0.1) for b in (own, adapted))
    for level in ("tokens", "image"):
        torch.testing.assert_close(getattr(got, level).dense(), getattr(want, level).dense())
        torch.testing.assert_close(getattr(got, level).weight, getattr(want, level).weight)


def test_a_photo_on_its_side_is_turned_upright(photos, maps):
    data = with_maps(photos, maps, transform=v2.ToImage())
    assert data[7].image.shape[-2:] == (88, 50)
    assert data[6].image.shape[-2:] == (50, 84)


def test_the_datasets_own_transform_is_taken_over_and_the_dataset_left_alone(folder, maps):
    own = ImageFolder(folder / "photos", PIPELINE)
    data = with_maps(Subset(own, [8, 1]), folder / "maps")
    batch = collate([data[0], data[1]])
    assert batch.keys == ("dog/08.jpg", "cat/01.jpg")
    assert batch.indices.tolist() == [0, 1]
    assert not torch.equal(batch.placement[0], torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
    assert own.transform is PIPELINE
    assert own[0][0].shape == (3, 32, 32)
    with pytest.raises(PipelineError, match="transform of its own"):
        with_maps(own, maps, transform=PIPELINE)


class Arrays(Dataset):
    """Images alone, of the kind that is asked for; keys are not known."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.make(np.full((50, 60 + 4 * i, 3), i, np.uint8))


KINDS = {
    "array": lambda pixels: pixels,
    "tensor": lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1),
    "grey": lambda pixels: Image.fromarray(pixels[..., 0]),
    "tuple": lambda pixels: (Image.fromarray(pixels),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_image_and_keys_by_list_or_function(maps, kind):
    keys = [f"cat/0{i}.jpg" for i in range(3)]
    for given in (keys, keys.__getitem__):
        data = with_maps(Arrays(KINDS[kind]), maps, v2.Compose([v2.ToImage(), v2.Resize((20, 20))]), keys=given)
        batch = collate([data[i] for i in range(3)])
        assert batch.images.shape == (3, 1 if kind == "grey" else 3, 20, 20)
        assert batch.labels.tolist() == [-1] * 3
        torch.testing.assert_close(batch.placement, torch.eye(2, 3).expand(3, 2, 3))
    with pytest.raises(PipelineError, match="keys="):
        with_maps(Arrays(KINDS[kind]), maps)


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # spawn pickles as forkserver does
def test_workers_of_every_kind_and_the_way_to_a_compiled_model(photos, maps, method):
    data = with_maps(photos, maps, transform=PIPELINE)
    pickle.loads(pickle.dumps(data))
    loader = DataLoader(data, 6, collate_fn=collate, num_workers=1, multiprocessing_context=method)
    model = torch.compile(nn.Conv2d(3, 2, 8, 8), backend="eager")
    seen = []
    for batch in loader:
        batch = batch.plan((4, 4)).to("cpu")
        assert model(batch.images).shape == (6, 2, 4, 4)
        assert label_tokens(batch.maps, batch.placement, (4, 4), batch.sampling).tokens.shape == (6, 4, 4)
        seen += batch.keys
    assert seen == data.keys


@pytest.mark.filterwarnings("ignore:RandomErasing")
def test_erasing_normalising_and_pure_tensors_leave_the_record_alone(photos, maps):
    end = [v2.RandomErasing(1.0), v2.ToPureTensor(), v2.RandomHorizontalFlip(1.0), v2.Normalize([0.5] * 3, [0.5] * 3)]
    data = with_maps(photos, maps, v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), *end]))
    np.testing.assert_allclose(data[0].placement, pl.hflip(), atol=1e-12)
    assert with_maps(photos, maps, nn.Sequential(v2.RandomVerticalFlip(1.0)))[0].placement[1, 1] == -1


REFUSED = [
    v2.RandAugment(), v2.AutoAugment(), v2.TrivialAugmentWide(), v2.AugMix(), v2.RandomPerspective(), v2.FiveCrop(8),
    v2.ElasticTransform(), v2.CutMix(num_classes=2), v1.RandomResizedCrop(32), v1.ToTensor(),
    RandomResizedCropAndInterpolation(32),
]  # fmt: skip


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: type(step).__name__)
def test_transforms_that_cannot_be_followed_are_refused_by_name(photos, maps, step):
    with pytest.raises(PipelineError, match=type(step).__name__):
        with_maps(photos, maps, transform=v2.Compose([v2.ToImage(), v2.RandomApply([step])]))


def shrink(sample):
    return F.resize(sample[0], [9, 9]), sample[1]


class Hidden(v2.Transform):
    """A perspective warp that no list of names can know."""

    def transform(self, inpt, params):
        corners = [[0, 0], [9, 0], [9, 9], [0, 9]]
        return F.perspective(inpt, corners, [[1, 0], [9, 0], [9, 9], [0, 9]])


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (shrink, "shrink"),
        (Hidden(), "Hidden"),
        (v2.Lambda(lambda x: x / 255), "Lambda"),
        (lambda image: image.float(), "lambda"),
    ],
)
def test_a_pipeline_that_loses_the_geometry_is_found_when_it_runs(photos, maps, step, name):
    data = with_maps(photos, maps, transform=v2.Compose([v2.ToImage(), step]))
    with pytest.raises(PipelineError, match=name):
        data[0]


def test_a_pipeline_that_fails_by_itself_fails_with_its_own_error(photos, maps):
    data = with_maps(photos, maps, transform=v2.Compose([v2.Normalize([0.5], [0.5])]))
    with pytest.raises(TypeError, match="PIL"):
        data[0]


def test_a_function_of_pixels_with_the_images_type_is_fine(photos, maps):
    steps = [v2.ToImage(), v2.Lambda(lambda x: x // 2, tv_tensors.Image), v2.CenterCrop(40)]
    assert with_maps(photos, maps, v2.Compose(steps))[0].placement[0, 0] == pytest.approx(40 / 60)


def test_a_store_of_other_images_is_named_before_the_first_item(folder, maps, tmp_path):
    for name in ("cat/00.jpg", "cat/new.jpg"):
        path = tmp_path / "other" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 90)).save(path)
    other = ImageFolder(tmp_path / "other")
    with pytest.raises(PipelineError, match=r"1 of the 2 images.*cat/new.jpg"):
        with_maps(other, maps)
    same_names = with_maps(Subset(other, [0]), maps, v2.ToImage())
    with pytest.raises(PipelineError, match=r"20x90.*60x50"):
        same_names[0]


def test_timms_dataset_tells_its_names_and_classes(folder, maps, tmp_path):
    data = with_maps(ImageDataset(folder / "photos"), maps, PIPELINE)
    assert sorted(data.keys) == sorted(maps)
    write_maps(tmp_path / "maps", dict.fromkeys(maps, (0, 0)), class_names=("dog", "cat"))
    for dataset in (ImageDataset(folder / "photos"), Subset(ImageFolder(folder / "photos"), [0])):
        with pytest.raises(PipelineError, match=r"'dog' is class 0 .* and 1 of the dataset"):
            with_maps(dataset, tmp_path / "maps", PIPELINE)


def test_keys_may_start_above_the_datasets_root(folder):
    inner = ImageFolder(folder / "photos")
    write_maps(folder / "above", {f"photos/{key}": (0, 0) for key in Maps(folder / "maps")})
    assert with_maps(inner, folder / "above", PIPELINE)[0].key == "photos/cat/00.jpg"


def test_images_of_different_sizes_in_a_batch_are_named(photos, maps):
    data = with_maps(photos, maps, transform=v2.ToImage())
    with pytest.raises(PipelineError, match="different shapes"):
        collate([data[0], data[1]])


@pytest.mark.parametrize("first", [v2.Identity(), v2.ToImage(), v2.PILToTensor()], ids=lambda step: type(step).__name__)
def test_our_randaugment_stands_in_a_pipeline_on_any_kind_of_image(photos, maps, first):
    data = with_maps(
        photos, maps, v2.Compose([v2.CenterCrop(40), first, RandAugment("rand-m9-n9-p1-inc1"), v2.ToImage()])
    )
    torch.manual_seed(0)
    placements = np.stack([data[0].placement for _ in range(5)])
    assert placements.std(0).max() > 0.01
    torch.manual_seed(0)
    assert np.array_equal(data[0].placement, placements[0])
    late = with_maps(photos, maps, v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), RandAugment("rand-m9-n9-p1")]))
    with pytest.raises(PipelineError, match="ToDtype"):
        late[0]
