"""`annotate` in several processes, with a disk that they share and with a disk each."""

from pathlib import Path

import pytest

from everytoken.maps import Maps, merge_maps
from everytoken_lab.annotators.annotator import build_annotator
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.annotators.options import AnnotateOptions
from everytoken_lab.data.datasets import open_dataset


def content(folder: Path) -> dict[str, bytes]:
    """All files of a store that must be equal in equal stores."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "runs.jsonl"}


@pytest.mark.timeout(600)
def test_processes_that_share_a_disk_make_one_store_and_those_with_a_disk_each_make_parts_of_it(
    photos_of, weights, tmp_path, start_ranks
):
    file, photos = weights("test_resnet"), photos_of(per_class=50)  # shards of 64, 64 and 22 images
    options = AnnotateOptions(batch_size=32, workers=0, class_map="order")
    fill_store(
        open_dataset(photos), tmp_path / "alone", build_annotator("timm:test_resnet", (64, 64), str(file)), options
    )
    words = ["annotate", photos, "--annotator", "timm:test_resnet", "--weights", file, "--img-size", "64", "-b", "32"]
    words += ["-j", "0", "--class-map", "order", "--device", "cpu", "--out"]

    assert [program.wait() for program in start_ranks(2, *words, tmp_path / "shared")] == [0, 0]
    assert content(tmp_path / "shared") == content(tmp_path / "alone")

    disks = [tmp_path / name for name in ("one", "two")]
    for disk in disks:
        disk.mkdir()
    programs = start_ranks(2, *words, "maps", inside=disks)
    assert [program.wait() for program in programs] == [0, 0], programs[0].err
    assert "maps: 86 maps of 150 images; other machines have the rest" in programs[0].out  # shards 0 and 2
    assert "maps: 64 maps of 150 images" in programs[1].out
    assert "everytoken maps merge maps OTHERS --out all-maps" in programs[1].out
    (disks[0] / "maps/shard-00002.json").unlink()  # as if that machine had been killed before
    second = start_ranks(2, *words, "maps", inside=disks[::-1])  # and the machines come back in another order
    assert [program.wait() for program in second] == [0, 0]
    kept = [sorted(p.name for p in (disk / "maps").glob("shard-*.json")) for disk in disks]
    assert kept == [["shard-00000.json"], ["shard-00001.json", "shard-00002.json"]]
    merge_maps([disk / "maps" for disk in disks], tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "alone")
    assert len(Maps(tmp_path / "merged")) == 150


def test_an_annotator_that_is_fitted_in_the_store_needs_a_disk_that_all_share(photos, tmp_path, start_ranks):
    disks = [tmp_path / name for name in ("one", "two")]
    for disk in disks:
        disk.mkdir()
    for program in start_ranks(2, "annotate", photos, "--annotator", "fit", "--out", "maps", inside=disks):
        assert program.wait() == 2
        assert "do not share the disk of maps" in program.err
