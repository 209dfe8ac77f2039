"""`annotate` in several processes that share a disk."""

import pytest

from everytoken.maps import Maps
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.annotators.annotator import build_annotator
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.data.datasets import open_dataset


@pytest.mark.timeout(600)
def test_processes_that_share_a_disk_make_the_store_of_one(photos_of, weights, tmp_path, start_ranks, content):
    file, photos = weights("test_resnet"), photos_of(per_class=50)  # shards of 64, 64 and 22 images
    options = AnnotateOptions(batch_size=32, workers=0, class_map="order")
    fill_store(
        open_dataset(photos), tmp_path / "alone", build_annotator("timm:test_resnet", (64, 64), str(file)), options
    )
    words = ["annotate", photos, "--annotator", "timm:test_resnet", "--weights", file, "--img-size", "64", "-b", "32"]
    words += ["-j", "0", "--class-map", "order", "--device", "cpu", "--out"]

    ranks = start_ranks(2, *words, tmp_path / "shared")
    assert [program.wait() for program in ranks] == [0, 0], ranks[0].err
    assert "".join(program.out for program in ranks).count("next:") == 1
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    assert len(Maps(tmp_path / "shared")) == 150


def test_processes_with_a_disk_each_are_told_to_share_one(photos, tmp_path, start_ranks):
    disks = [tmp_path / name for name in ("one", "two")]
    for disk in disks:
        disk.mkdir()
    words = ["annotate", photos, "--annotator", "timm:test_resnet", "--out", "maps"]
    for program in start_ranks(2, *words, inside=disks):
        assert program.wait() == 2
        assert "do not share the disk of maps" in program.err
