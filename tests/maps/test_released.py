"""Released .pt maps: read without running anything, checked, refused by name."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from PIL import Image, ImageOps

from everytoken.maps import Maps
from everytoken.maps.errors import StoreError
from everytoken.maps.released import read_released, released_path
from everytoken_lab.maps.released import import_released

torch = pytest.importorskip("torch")


def released_map(seed: int, grid=(15, 15), top_k: int = 5, num_classes: int = 1000) -> torch.Tensor:
    """As the released generator saves it: float16, a permuted view of an [h, w, k] buffer."""
    generator = torch.Generator().manual_seed(seed)
    scores, ids = torch.rand((*grid, num_classes), generator=generator).mul(20).half().float().topk(top_k, dim=-1)
    tensor = torch.stack([scores, ids.float()]).half().permute(0, 3, 1, 2)
    assert not tensor.is_contiguous()
    return tensor


def save(root, name: str, value: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def draw(path, size, orientation: int = 1) -> None:
    """A black image, which lies on its side if its EXIF orientation says so."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path, "JPEG" if path.suffix == ".jfif" else None, exif=exif)


def planes(score_map):
    """The content of a released file."""
    return torch.from_numpy(np.stack([score_map.scores, score_map.classes.astype(np.float16)])).permute(0, 3, 1, 2)


def test_a_tree_of_released_maps_is_kept_exactly(tmp_path):
    names = [f"n0{i % 2}/n0{i % 2}_{i}.pt" for i in range(70)]
    for i, name in enumerate(names):
        save(tmp_path / "pt", name, released_map(i))
    seen = []
    _, notes = import_released(tmp_path / "pt", tmp_path / "s", progress=lambda *step: seen.append(step))
    assert seen[-1] == (70, 70)
    assert "'squash' is assumed" in notes[0]
    store = Maps(tmp_path / "s")
    assert store.key(0) == "n00/n00_0"
    assert (store.meta.grid, store.meta.top_k, store.meta.resize_mode) == ((15, 15), 5, "squash")
    assert store.read(0).size == (0, 0)
    for name in names:
        assert torch.equal(torch.load(tmp_path / "pt" / name, weights_only=True), planes(store[name[:-3]]))


def test_rows_columns_and_order_are_kept(tmp_path):
    tensor = torch.zeros(2, 2, 3, 4, dtype=torch.float16)
    tensor[0, 0], tensor[0, 1] = 9, 1
    tensor[1, 1] = 50
    tensor[1, 0, 2, 1] = 33  # row 2, column 1
    save(tmp_path, "a/b.pt", tensor)
    scores, classes = read_released(tmp_path / "a/b.pt", 100)
    assert scores.shape == (3, 4, 2)
    assert np.argwhere(classes[..., 0] == 33).tolist() == [[2, 1]]
    assert (scores[..., 0] == 9).all()


def test_keys_are_image_paths_when_images_are_given_and_sizes_are_upright(tmp_path):
    for name, size in (("x/n01/a.b.JPEG", (60, 30)), ("x/n02/c.png", (20, 40)), ("x/n02/new.png", (9, 9))):
        draw(tmp_path / "images" / name, size)
    draw(tmp_path / "images/x/n01/turned.jpg", (50, 100), orientation=6)
    for i, name in enumerate(("n01/a.pt", "n02/c.pt", "n01/turned.pt", "n02/orphan.pt")):
        save(tmp_path / "pt", name, released_map(i, (18, 18)))
    store, notes = import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images")
    assert notes[-1] == "1 label files have no image (for example n02/orphan.pt)"
    assert list(store) == ["x/n01/a.b.JPEG", "x/n01/turned.jpg", "x/n02/c.png"]
    assert store.skipped == {"x/n02/new.png": "there is no label file n02/new"}
    assert store.meta.resize_mode == "center"  # as the released generator does it
    assert store["x/n01/a.b.JPEG"].size == (60, 30)
    assert store["x/n01/a.b.JPEG"].area == pytest.approx((0.25, 0, 0.75, 1))
    assert store["x/n01/turned.jpg"].size == (100, 50)
    assert torch.equal(torch.load(tmp_path / "pt/n02/c.pt"), planes(store["x/n02/c.png"]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_maps_are_turned_upright_with_their_images(tmp_path, orientation):
    number = np.arange(225).reshape(15, 15)
    tensor = torch.zeros(2, 2, 15, 15, dtype=torch.float16)
    tensor[0, 0], tensor[0, 1] = torch.from_numpy(number % 40 + 1.0), 0.5
    tensor[1, 0], tensor[1, 1] = torch.from_numpy(number.astype(np.float32)), 999
    save(tmp_path / "pt", "a/x.pt", tensor)
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "images/a").mkdir(parents=True)
    # a picture of the map: each cell is 2 x 1 pixels of its number
    Image.fromarray(number.astype(np.uint8).repeat(2, axis=1)).save(tmp_path / "images/a/x.png", exif=exif)
    import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images")
    with Image.open(tmp_path / "images/a/x.png") as image:
        picture = ImageOps.exif_transpose(image)
    one = Maps(tmp_path / "s")["a/x.png"]
    assert one.size == picture.size
    cells = np.asarray(picture.resize((15, 15), Image.Resampling.NEAREST))
    assert np.array_equal(one.classes[..., 0], cells)
    assert np.array_equal(one.scores[..., 0], cells % 40 + 1.0)


def test_an_import_takes_every_image_of_a_data_set_and_survives_a_bomb_and_a_circle_of_links(tmp_path, monkeypatch):
    for name in ("a", "b", "bomb"):
        save(tmp_path / "pt", f"n/{name}.pt", released_map(1))
    folder = tmp_path / "images/n"
    for name, size in (("a.jfif", (30, 20)), ("b.png", (30, 20)), ("bomb.png", (200, 100))):
        draw(folder / name, size)
    (folder / "again").symlink_to(folder, target_is_directory=True)
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "1000")
    store, _ = import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images")
    assert list(store) == ["n/a.jfif", "n/b.png"]
    assert list(store.skipped) == ["n/bomb.png"]
    assert "200 x 100 pixels" in store.skipped["n/bomb.png"]
    assert str(tmp_path) not in store.skipped["n/bomb.png"]


def test_a_turned_image_cannot_have_an_oblong_map(tmp_path):
    for name, orientation in (("flat", 1), ("turned", 6)):
        save(tmp_path / "pt", f"a/{name}.pt", released_map(1, (3, 4)))
        draw(tmp_path / f"images/a/{name}.png", (40, 30), orientation)
    store, _ = import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images", resize_mode="squash")
    assert len(store) == 1
    assert "lies on its side" in store.skipped["a/turned.png"]


def test_two_images_that_claim_one_label_file_are_reported_and_get_none(tmp_path):
    for name in ("a/cat.1.jpg", "a/cat.2.jpg", "a/dog.jpg"):
        draw(tmp_path / "images" / name, (8, 8))
    for name in ("a/cat.pt", "a/dog.pt"):
        save(tmp_path / "pt", name, released_map(1))
    store, notes = import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images")
    assert store.skipped == dict.fromkeys(["a/cat.1.jpg", "a/cat.2.jpg"], "shares its label file a/cat with others")
    assert not any("no image" in note for note in notes)
    assert list(store) == ["a/dog.jpg"]


class Evil:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_holds_code_is_refused_by_name_and_not_run(tmp_path):
    save(tmp_path / "pt", "a/good.pt", released_map(0))
    save(tmp_path / "pt", "a/evil.pt", Evil(tmp_path / "ran"))
    (tmp_path / "pt/a/raw.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "pt/a/old.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=2))
    store, _ = import_released(tmp_path / "pt", tmp_path / "s")
    assert not (tmp_path / "ran").exists()
    assert list(store) == ["a/good"]
    assert sorted(store.skipped) == ["a/evil", "a/old", "a/raw"]
    assert "a/evil.pt holds a Python object or code (posix.system)" in store.skipped["a/evil"]
    torch.load(tmp_path / "pt/a/evil.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def change(where, value, base=None):
    tensor = released_map(0).clone() if base is None else base
    tensor[where] = value
    return tensor


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (change((0, 0, 0, 0), float("nan")), "not finite"),
        (change((1, 0, 0, 0), float("inf")), "not finite"),
        (change((1, 0, 0, 0), 1000), "class id 1000"),
        (change((1, 0, 0, 0), 3.5), "class id 3.5"),
        (change((1, 0, 0, 0), -1), "class id -1"),
        (change((1, slice(None), 0, 0), 7), "twice in one cell"),
        (change((0, 0, 0, 0), 1e5, released_map(0).float()), "range of float16"),
        (released_map(0)[0], "shape"),
        (released_map(0).expand(2, 5, 15, 15)[None], "shape"),
        (torch.zeros(1).half().expand(2, 5, 10**6, 10**6), "shape"),
        (released_map(0).double(), "float64"),
        (released_map(0).to_sparse(), "no plain tensor"),
        ({"map": released_map(0)}, "dict"),
        ([1], "list"),
    ],
)
def test_a_map_with_impossible_values_is_refused_with_the_reason(tmp_path, value, complaint):
    save(tmp_path, "x.pt", value)
    with pytest.raises(StoreError, match=complaint):
        read_released(tmp_path / "x.pt", 1000)


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"PK\x03\x04"])
def test_a_file_that_is_no_torch_file_is_refused(tmp_path, raw):
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(StoreError, match="cannot be loaded as plain tensors"):
        read_released(tmp_path / "x.pt", 1000)
    save(tmp_path, "y.pt", released_map(0))
    (tmp_path / "y.pt").write_bytes((tmp_path / "y.pt").read_bytes()[:2000])
    with pytest.raises(StoreError, match="cannot be loaded as plain tensors"):
        read_released(tmp_path / "y.pt", 1000)


def test_a_map_of_another_grid_than_the_rest_is_refused(tmp_path):
    save(tmp_path / "pt", "a/0.pt", released_map(0, (7, 7)))
    for i in range(1, 4):
        save(tmp_path / "pt", f"a/{i}.pt", released_map(i))
    for _ in range(2):  # the second time there is nothing to do
        store, _ = import_released(tmp_path / "pt", tmp_path / "s")
        assert list(store.skipped) == ["a/0"]
        assert len(store) == 3


def test_ids_that_float16_has_rounded_are_not_believed(tmp_path):
    low, high = released_map(0, num_classes=2047), released_map(1)
    high[1] = (torch.arange(5) + 3001).half().reshape(5, 1, 1).expand(5, 15, 15)  # 3001 is 3000 there
    high[1, 0] = 2048
    save(tmp_path / "pt", "a/low.pt", low)
    save(tmp_path / "pt", "a/high.pt", high)
    store, _ = import_released(tmp_path / "pt", tmp_path / "s", num_classes=21841)
    assert "rounded" in store.skipped["a/high"]
    assert list(store) == ["a/low"]


def test_unsorted_float32_maps_are_sorted(tmp_path):
    tensor = released_map(0).float()
    save(tmp_path, "x.pt", tensor.flip(1))
    scores, classes = read_released(tmp_path / "x.pt", 1000)
    assert (np.diff(scores, axis=-1) <= 0).all()
    expected = np.take_along_axis(tensor[1].permute(1, 2, 0).numpy(), np.zeros((15, 15, 1), int), -1)
    assert np.array_equal(classes[..., :1], expected) or (tensor[0, 0] == tensor[0, 1]).any()


def test_an_import_that_cannot_work_says_why(tmp_path):
    with pytest.raises(StoreError, match="no folder"):
        import_released(tmp_path / "nowhere", tmp_path / "s")
    (tmp_path / "pt").mkdir()
    with pytest.raises(StoreError, match=r"no \.pt files"):
        import_released(tmp_path / "pt", tmp_path / "s")
    save(tmp_path / "pt", "a/x.pt", [1])
    with pytest.raises(StoreError, match=r"a/x\.pt holds no plain tensor"):
        import_released(tmp_path / "pt", tmp_path / "s")
    save(tmp_path / "pt", "a/x.pt", released_map(0, (18, 18)))
    with pytest.raises(StoreError, match="images"):
        import_released(tmp_path / "pt", tmp_path / "s")
    draw(tmp_path / "images/b/z.jpg", (8, 8))
    with pytest.raises(StoreError, match=r"b/z\.jpg would need b/z\.pt; the label files look like a/x\.pt"):
        import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images")
    assert not (tmp_path / "s").exists()


def test_class_names_come_from_the_class_folders_if_their_number_fits(tmp_path):
    for name in ("b", "a"):
        save(tmp_path / "pt", f"{name}/x.pt", released_map(0, top_k=2, num_classes=2))
        draw(tmp_path / f"images/{name}/x.jpg", (8, 8))
    import_released(tmp_path / "pt", tmp_path / "s", tmp_path / "images", num_classes=2)
    assert Maps(tmp_path / "s").meta.class_names == ["a", "b"]


def test_the_released_path_is_the_last_folder_and_the_name_up_to_the_first_dot():
    assert released_path("train/n01/n01_1.JPEG") == "n01/n01_1.pt"
    assert released_path("deep/er/a.b.c.jpg") == "er/a.pt"
    assert released_path("flat.jpg") == "flat.pt"
