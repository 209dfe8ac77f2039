"""Labels from a CSV file."""

import json

import pytest
from PIL import Image

from everytoken_lab.cli import main
from everytoken_lab.data.datasets import DataError, open_dataset, open_splits
from everytoken_lab.data.tree import dataset_title, find_split
from everytoken_lab.engine.run_folder import _train_folder


@pytest.fixture
def folder(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/3.png", "b/4.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return tmp_path / "photos"


def write(folder, text, name="labels.csv", encoding="utf-8"):
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def test_one_label_per_image_is_a_usual_dataset_whatever_the_folders_are(folder):
    write(folder, "label,path,remark\ndog,b/3.png,x\ncat,a/1.png,\ndog,a/2.png,\n")
    data = open_dataset(folder)
    assert list(data.keys()) == ["a/1.png", "a/2.png", "b/3.png"]
    assert data.class_names == ["cat", "dog"]
    assert data.labels.tolist() == [0, 1, 1]
    assert not data.multi_label
    assert data.load(0).size == (8, 8)


def test_several_labels_are_rows_of_ones_and_a_semicolon_alone_is_none(folder):
    file = write(folder, "path,label\na/1.png,dog; cat\na/2.png,;\nb/3.png,cat\n")
    data = open_dataset(file)
    assert data.multi_label
    assert data.labels.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert [data.label_text(i) for i in range(3)] == ["cat;dog", "", "cat"]
    assert data.class_counts().tolist() == [2, 1]
    assert data.strata().tolist() == [1, 2, 0]
    assert data.subset([2, 0]).labels.tolist() == [[1, 0], [1, 1]]


def test_the_split_column_divides_and_test_images_validate_where_there_are_no_others(folder):
    write(folder, "path,label,split\na/1.png,cat,train\na/2.png,dog,Training\nb/3.png,dog,test\n")
    train, val = open_splits(folder)
    assert (list(train.keys()), list(val.keys())) == (["a/1.png", "a/2.png"], ["b/3.png"])
    assert val.labels.tolist() == [1]
    write(folder, "path,label,split\na/1.png,cat,train\na/2.png,dog,train\nb/3.png,dog,test\nb/4.png,cat,valid\n")
    assert list(open_dataset(folder, "val").keys()) == ["b/4.png"]
    assert list(open_dataset(folder, "test").keys()) == ["b/3.png"]
    write(folder, "path,label\na/1.png,cat\na/2.png,dog\n")
    assert find_split(str(folder), "val") is None


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ('path;label\r\na\\1.png;"cat;dog"\r\n.\\b\\3.png;cat\r\n', "utf-8-sig"),
        ("path\tlabel\na/1.png\tcat;dog\nb//3.png\tcat\n\n", "utf-16"),
    ],
)
def test_files_of_spreadsheets_and_windows_paths_are_read(folder, text, encoding):
    data = open_dataset(write(folder, text, encoding=encoding))
    assert list(data.keys()) == ["a/1.png", "b/3.png"]
    assert data.labels.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na/1.png,cat\n", r"line 1: there is no column path; there is file, label\.(.|\n)*Rename the file"),
        ("", "labels.csv is empty"),
        ("path,label\n", "lists no images"),
        ("path,label\na/1.png,cat\na/9.png,cat\nc.png,dog\n", r"line 3: there is no file a/9.png \(and 1 more\)"),
        ("path,label\na/1.png, \n", "line 2: a/1.png has no label"),
        ("path,label\n,cat\n", "line 2 has no path"),
        ("path,label\na/1.png,cat\n\n./a/1.png,dog\n", "line 4: a/1.png was in line 2 already"),
        ("path,label\n../secret.png,cat\n", r"line 2 names the file '../secret.png', which leaves the folder"),
        ("path,label\n/etc/a.png,cat\n", "leaves the folder"),
        ("path,label\nC:\\a.png,cat\n", "leaves the folder"),
        ("path,label\na/1.png\n", "line 2 has 1 cells, and the first line 2"),
        ("path,label,split\na/1.png,cat,dev\n", "line 2: the split is 'dev'; it can be train, val or test"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_line(folder, text, message):
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(write(folder, text))
    assert "labels.csv" in str(caught.value)


def test_another_encoding_and_an_unknown_label_of_validation_name_their_lines(folder):
    file = write(folder, "path,label\na/1.png,cat\na/2.png,chou-fleur brûlé\n", encoding="latin-1")
    with pytest.raises(DataError, match="line 3 is not UTF-8 text: save the file as UTF-8"):
        open_dataset(file)
    write(folder, "path,label,split\na/1.png,cat,train\nb/3.png,catt,val\n")
    with pytest.raises(DataError, match=r"line 3: the label 'catt' is not one of the 1 classes.*Did you mean 'cat'"):
        open_dataset(folder, "val")


def test_a_folder_and_its_labels_file_are_the_same_data_and_have_one_name(folder):
    file = write(folder, "path,label\na/1.png,cat\na/2.png,dog\n")
    assert _train_folder(folder) == _train_folder(file)
    assert dataset_title(str(folder)) == dataset_title(str(file)) == "photos"
    assert dataset_title("data/birds.csv") == "birds"
    (folder / "list.txt").write_text("cat\n")
    assert list(open_dataset(f"subset:{folder / 'list.txt'}:{file}").keys()) == ["a/1.png"]


def test_the_doctor_reads_labels_files_and_says_what_is_wrong_with_them(folder, capsys):
    write(folder, "path,label\na/1.png,cat;dog\na/2.png,cat\nb/3.png,;\nb/4.png,dog;cat\n")
    main(["doctor", str(folder), "--json"])
    found = {f["code"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["tiny-class"]["examples"] == ["dog: 2", "cat: 3"]
    assert found["duplicate-classes"]["count"] == 2  # the images are the same; of two, so are the labels
    write(folder, "path,label\na/1.png,cat\na/7.png,dog\n")
    assert main(["doctor", str(folder), "--json"]) == 1
    (unusable,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["code"] == "data-unusable"]
    assert "line 3: there is no file a/7.png" in unusable["what"]
