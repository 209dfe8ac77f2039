"""The numbers about maps, and the pictures of them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken_lab import draw
from everytoken_lab.draw import OTHER, PALETTE, PANEL
from everytoken_lab.maps.sheet import OTHERS, WRONG, load_photo, pick, sheet_picture
from everytoken_lab.maps.summary import folder_label, probability, sample_positions, summarize, summarize_store

NAMES = ["ant", "bee", "cat", "dog"]


def simple_map(top, area=(0.0, 0.0, 1.0, 1.0), strong: float = 8.0, size=(100, 100)) -> ScoreMap:
    """Best class per cell as given, the next class (modulo 4) as second."""
    top = np.asarray(top)
    classes = np.stack([top, (top + 1) % 4], axis=-1).astype(np.uint16)
    scores = np.broadcast_to(np.array([strong, 1.0], np.float16), classes.shape).copy()
    return ScoreMap(scores, classes, size, area)


def make_store(path, maps: dict[str, ScoreMap], names=NAMES) -> Maps:
    grid = next(iter(maps.values())).scores.shape[:2]
    meta = StoreMeta(grid, 2, names, num_classes=4, annotator={"name": "test"})
    with MapWriter(path, maps, meta) as writer:
        writer.write(maps)
        writer.finalize()
    return Maps(path)


def test_confidence_is_the_softmax_over_all_classes_with_absent_ones_at_zero():
    rng = np.random.default_rng(0)
    logits = np.zeros(10)
    logits[:3] = rng.normal(size=3) * 5
    dense = np.exp(logits) / np.exp(logits).sum()
    assert probability(logits[:3].astype(np.float32), 10, 3) == pytest.approx(dense[:3], rel=1e-5)
    assert np.isfinite(probability(np.array([6e4, -6e4], np.float16), 10, 2)).all()


def test_a_summary_finds_the_main_class():
    one = summarize(simple_map([[2, 2, 2], [2, 3, 0]]), 4)
    assert (one.image_class, one.vocabulary) == (2, 3 + 1)
    assert one.confidence == pytest.approx(np.exp(8) / (np.exp(8) + np.exp(1) + 2), abs=1e-4)


def test_cells_of_the_padding_do_not_count():
    padded = simple_map([[0, 0], [1, 1], [1, 1], [0, 0]], area=(0.0, -0.5, 1.0, 1.5))
    one = summarize(padded, 4)
    assert (one.image_class, one.vocabulary) == (1, 2)
    assert one.inside.tolist() == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]


def test_the_folder_label_is_the_innermost_folder_with_a_class_name():
    ids = {name: i for i, name in enumerate(NAMES)}
    assert folder_label("train/cat/1.jpg", ids.get) == 2
    assert folder_label("cat/dog/1.jpg", ids.get) == 3
    assert folder_label("birds/cat.jpg", ids.get) is None
    assert folder_label("cat", ids.get) is None


def test_samples_are_spread_evenly():
    assert sample_positions(10, 5) == [0, 2, 4, 6, 8]
    assert sample_positions(3, 10) == [0, 1, 2]
    assert sample_positions(0, 10) == sample_positions(10, 0) == []


def test_wrong_images_come_first_and_the_surest_of_them_first(tmp_path):
    maps = {f"cat/{i}.jpg": simple_map([[2, 2], [2, 2]]) for i in range(20)}
    maps["cat/sure.jpg"] = simple_map([[1, 1], [1, 1]], strong=9)
    maps["cat/unsure.jpg"] = simple_map([[1, 1], [1, 1]], strong=3)
    store = make_store(tmp_path / "s", maps)
    picks, counts = pick(store, 8)
    assert [key for key, kind in picks if kind == WRONG] == ["cat/sure.jpg", "cat/unsure.jpg"]
    assert picks[0][0] == "cat/sure.jpg"
    assert len(picks) == 8
    assert len(set(picks)) == 8
    assert counts == {WRONG: 2, OTHERS: 20}
    everything, _ = pick(store, 100)
    assert sorted(key for key, _ in everything) == sorted(store)
    assert ("cat/sure.jpg", WRONG) in pick(store, 3)[0]
    seen = summarize_store(store)
    assert (seen.looked_at, seen.images_agree) == (22, pytest.approx(20 / 22))
    nameless = make_store(tmp_path / "t", maps, names=[])
    assert summarize_store(nameless).images_agree is None


def pixel(picture: Image.Image, x: float, y: float) -> np.ndarray:
    return np.asarray(picture)[int(y * picture.height), int(x * picture.width)].astype(int)


def panel_of(one: ScoreMap, size=(200, 100)) -> tuple[Image.Image, dict[int, str]]:
    photo = Image.new("RGB", size, "#808080")
    summary = summarize(one, 4)
    legend = {c: draw.PALETTE[i] for i, c in enumerate(np.unique(summary.top).tolist())}
    return draw.class_overlay(photo, summary.top, summary.confidence, legend, one.area), legend


def is_like(colour: np.ndarray, name: str) -> bool:
    """The same hue: the pixel differs from grey in the direction of the colour."""
    wanted = np.array(draw.rgb(name)) - 128
    return float(np.dot(colour - 128, wanted)) > 0.9 * np.linalg.norm(colour - 128) * np.linalg.norm(wanted) > 0


def test_cells_are_painted_where_they_lie_in_the_image():
    picture, legend = panel_of(simple_map([[0, 1], [2, 3]]))
    for class_id, x, y in ((0, 0.25, 0.25), (1, 0.75, 0.25), (2, 0.25, 0.75), (3, 0.75, 0.75)):
        assert is_like(pixel(picture, x, y), legend[class_id])


def test_a_centre_cropped_map_leaves_the_sides_grey_and_a_letterboxed_one_is_cut():
    cropped, legend = panel_of(simple_map([[0, 1], [0, 1]], area=(0.25, 0.0, 0.75, 1.0)))
    for x in (0.1, 0.9):
        assert np.ptp(pixel(cropped, x, 0.5)) == 0
    assert is_like(pixel(cropped, 0.3, 0.5), legend[0])
    assert is_like(pixel(cropped, 0.7, 0.5), legend[1])
    boxed, legend = panel_of(simple_map([[3, 3], [0, 0], [1, 1], [3, 3]], area=(0.0, -0.5, 1.0, 1.5)))
    assert is_like(pixel(boxed, 0.5, 0.2), legend[0])
    assert is_like(pixel(boxed, 0.5, 0.8), legend[1])


def test_a_sure_cell_is_painted_stronger_than_an_unsure_one():
    strong, legend = panel_of(simple_map([[0]], strong=9))
    weak, _ = panel_of(simple_map([[0]], strong=1))
    assert is_like(pixel(weak, 0.5, 0.5), legend[0])
    assert np.abs(pixel(strong, 0.5, 0.5) - 128).sum() > 1.3 * np.abs(pixel(weak, 0.5, 0.5) - 128).sum()


def test_a_class_keeps_its_colour_on_a_sheet_and_no_colour_is_used_twice_in_a_tile():
    colours = draw.ClassColours()
    first = colours.choose(["ant", "bee"])
    second = colours.choose(["cat", "bee"])
    assert second["bee"] == first["bee"]
    assert second["cat"] != second["bee"]
    many = colours.choose([f"class {i}" for i in range(20)])
    assert len(many) == len(PALETTE) == len(set(many.values()))
    assert OTHER not in many.values()
    for _ in range(5):
        clash = colours.choose(["class 7", "ant", "bee"])
        assert len(set(clash.values())) == 3


def test_photos_are_shown_upright_and_changed_or_broken_ones_are_remarked(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 600)).save(tmp_path / "turned.jpg", exif=exif)
    photo, remark = load_photo(tmp_path / "turned.jpg", (600, 300))
    assert photo is not None
    assert (photo.size, remark) == ((PANEL, PANEL // 2), "")
    _, remark = load_photo(tmp_path / "turned.jpg", (300, 600))
    assert "not the annotated one" in remark
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    photo, remark = load_photo(tmp_path / "broken.jpg", (1, 1))
    assert photo is None
    assert "cannot show broken.jpg" in remark
    assert "cannot show" in load_photo(tmp_path / "missing.jpg", (1, 1))[1]
    Image.new("RGB", (8, 8)).save(tmp_path / "tiny.png")
    tiny, _ = load_photo(tmp_path / "tiny.png", (8, 8))
    assert tiny is not None
    assert tiny.size == (PANEL, PANEL)


def test_a_sheet_has_room_for_every_image_and_survives_odd_names(tmp_path):
    odd = "日本/\udcff/" + "very_long_" * 20 + "/{}.jpg"
    maps = {odd.format(i): simple_map([[0, 1], [2, 3]]) for i in range(5)}
    store = make_store(tmp_path / "s", maps, names=["имя " * 30 + str(i) for i in range(4)])
    every, one = sheet_picture(store), sheet_picture(store, list(maps)[:1])
    assert every.height > 3 * PANEL > one.height
    assert len(every.getcolors(10**7)) > 50


def test_a_store_shows_itself_and_tokens_are_drawn_where_they_are(tmp_path):
    maps = make_store(tmp_path / "maps", {"ant/1.png": simple_map([[0, 1]]), "bee/2.png": simple_map([[2, 2]])})
    some, every = (sheet_picture(maps, keys) for keys in (("ant/1.png",), ()))
    assert some.height < every.height
    photo = Image.new("RGB", (40, 20), "#808080")
    picture = draw.class_overlay(photo, np.array([[7, 9]]), np.ones((1, 2)), {7: "#ff0000"})
    left, right = picture.getpixel((5, 10)), picture.getpixel((35, 10))
    assert left[0] > left[1]
    assert len(set(right)) == 1, "a class without a colour is grey"


def test_the_legend_has_the_classes_of_the_cells_by_their_number_and_leaves_out_what_is_none():
    photo, classes = Image.new("RGB", (40, 30), "#808080"), np.array([[0, 1, 1, -1], [2, 1, 1, -1], [0, 1, 3, -1]])
    names = ["ant", "bee", "cat", "ant"]
    colours = draw.ClassColours(names)
    picture, legend = draw.class_picture(photo, classes, np.ones((3, 4)), names.__getitem__, colours)
    told = [(entry.name, round(entry.fraction, 2)) for entry in legend]
    assert told == [("bee", 0.56), ("ant", 0.33), ("cat", 0.11)]
    assert is_like(pixel(picture, 0.4, 0.1), draw.colour_of(1))
    many, legend = draw.class_picture(photo, np.arange(12).reshape(3, 4), np.ones((3, 4)), str, draw.ClassColours())
    assert (legend[-1].name, legend[-1].colour, round(legend[-1].fraction, 2)) == ("others", draw.OTHER, 0.17)
    assert np.ptp(pixel(many, 0.95, 0.95)) == 0


def test_objects_have_the_colours_of_their_classes_with_contours_that_show_what_is_inside():
    pixels, masks = np.full((100, 100, 3), 128, np.uint8), [np.zeros((100, 100), bool) for _ in range(3)]
    boxes = np.array([(10, 30, 40, 60), (60, 30, 90, 60), (10, 70, 40, 95)], np.float32)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.astype(int).tolist(), strict=True):
        mask[y0 + 6 : y1 - 6, x0 + 6 : x1 - 6] = True
    picture = np.asarray(draw.object_overlay(pixels, boxes, ["ant", "bee", "ant"], [0, 1, 0], masks)).astype(int)
    for (x0, y0, x1, y1), number in zip(boxes.astype(int).tolist(), (0, 1, 0), strict=True):
        colour = draw.rgb(draw.colour_of(number))
        assert tuple(picture[(y0 + y1) // 2, x0]) == colour  # the frame
        assert tuple(picture[(y0 + y1) // 2, x0 + 6]) == colour  # the contour
        inner = picture[(y0 + y1) // 2, (x0 + x1) // 2] - 128
        assert 0 < np.abs(inner).max() < 0.3 * np.abs(np.array(colour) - 128).max()


def test_large_areas_carry_the_name_of_their_class_and_the_photo_keeps_its_colours():
    photo, classes = Image.new("RGB", (232, 232), "#2060a0"), np.array([[0, 1], [0, 1]])
    picture, _ = draw.class_picture(
        photo, classes, np.full((2, 2), 0.01), ["ant", "bee"].__getitem__, draw.ClassColours()
    )
    plain = draw.class_overlay(photo, classes, np.full((2, 2), 0.01), {0: draw.PALETTE[0], 1: draw.PALETTE[1]})
    assert np.abs(pixel(plain, 0.25, 0.25) - draw.rgb("#2060a0")).max() < 15
    changed = (np.asarray(picture) != np.asarray(plain)).any(-1)
    assert changed[:, :116].any()
    assert changed[:, 116:].any()
    few, _ = draw.class_picture(
        photo.resize((20, 20)), classes, np.ones((2, 2)), ["ant", "bee"].__getitem__, draw.ClassColours()
    )
    assert (
        np.asarray(few)
        == np.asarray(
            draw.class_overlay(
                photo.resize((20, 20)), classes, np.ones((2, 2)), {0: draw.PALETTE[0], 1: draw.PALETTE[1]}
            )
        )
    ).all()  # too small for names
