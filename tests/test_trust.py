"""What docs/trust.md promises about the network, foreign code, links, special files, texts and numbers."""

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.mixing import build_mixer
from everytoken_lab import schema
from everytoken_lab.cli import main
from everytoken_lab.data.archives import ArchiveReader
from everytoken_lab.data.decode import ImageError, Picture, read_header
from everytoken_lab.data.loader import WorkerError, Workers
from everytoken_lab.engine.options import TrainOptions, apply, overrides
from everytoken_lab.engine.run_folder import RunFolder, read_run
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import _downloading, open_model
from everytoken_lab.training.classify import train

SRC = Path(__file__).parent.parent / "src"


@cache
def calls():
    """(file, call) of all calls in the packages."""
    files = [(path.relative_to(SRC).as_posix(), ast.parse(path.read_text())) for path in SRC.rglob("*.py")]
    return [(name, node) for name, tree in files for node in ast.walk(tree) if isinstance(node, ast.Call)]


# -- telemetry --------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    """(host:port, what was sent to it so far, a bytes for each connection)"""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                heard.append(b"")
                with contextlib.suppress(OSError):
                    heard[-1] = connection.recv(200)

    threading.Thread(target=listen, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}", heard
    server.close()


@pytest.fixture
def watched(tmp_path, listener):
    """Runs code in a process whose proxy is a listener here and whose home is empty.

    Returns what it printed, what reached the proxy, and the files in its home.
    """
    address, heard = listener

    def run(code: str, **more: str) -> tuple[str, list[bytes], list[str]]:
        home, proxy = tmp_path / "home", f"http://{address}"
        home.mkdir()
        keep = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")  # CI and PYTEST_... silence some packages
        environment = {name: os.environ[name] for name in keep if name in os.environ} | {"HOME": str(home)} | more
        environment |= {name: proxy for word in ("http", "https", "all") for name in (f"{word}_proxy",)}
        environment |= {name.upper(): value for name, value in environment.items() if name.endswith("_proxy")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=home, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, heard, sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file())

    return run


def test_onnxruntime_reports_nothing_and_leaves_no_device_id(watched):
    """It connects after some ten seconds, and writes a device id and a database at once, which is looked for here."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    code = (
        "import torch; from everytoken_lab.models.onnx import faster\n"
        "module = torch.nn.Conv2d(3, 4, 3).eval()\n"
        "print(faster(module, torch.randn(3, 3, 8, 8)) is not module)"
    )
    assert watched(code) == ("True\n", [], [])


def test_mlflow_reports_nothing_and_leaves_no_installation_id(watched, tmp_path):
    pytest.importorskip("mlflow")
    code = (
        "import pathlib\nfrom everytoken_lab.engine.options import RunOptions\n"
        "from everytoken_lab.engine.track import build_trackers\n"
        "for tracker in build_trackers(RunOptions(mlflow='birds'), pathlib.Path(), {'lr': 0.1}): tracker.close()"
    )
    store = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}
    assert watched(code, **store) == ("", [], ["trackers.json"])


def test_commands_turn_off_the_reports_of_the_hub_and_of_wandb(watched):
    pytest.importorskip("wandb")
    code = (
        "from everytoken_lab.cli import main; main(['recipes'])\n"
        "import huggingface_hub.constants, wandb.env\n"
        "print(huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY, wandb.env.error_reporting_enabled())"
    )
    out, heard, files = watched(code)
    assert out.splitlines()[-1] == "True False"
    assert not heard
    assert not files


def test_a_download_from_python_turns_off_the_reports_of_the_hub(monkeypatch):
    from everytoken_lab.models.open import _downloading

    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with _downloading("nothing"):
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_who_wants_telemetry_keeps_it(monkeypatch):
    from everytoken.errors import no_telemetry

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    no_telemetry()
    assert os.environ["WANDB_ERROR_REPORTING"] == "true"


def test_packages_with_telemetry_are_imported_at_one_door():
    """`errors.need`, which turns it off first."""
    reporting = ("import onnxruntime", "import wandb", "import mlflow", "import datasets")
    lines = [(path, line.strip()) for path in SRC.rglob("*.py") for line in path.read_text().splitlines()]
    assert [(path.name, line) for path, line in lines if line.startswith(reporting)] == []


# -- code -------------------------------------------------------------------------------------------------------------

TINY = [
    *("--model", "vit_nano_patch4_32", "--img-size", "32", "--epochs", "1", "--batch-size", "12", "--workers", "0"),
    *("--threads", "1", "--device", "cpu", "--warmup-epochs", "0", "--aa", ""),
]
MODULE = """
from pathlib import Path
import torch
Path({mark!r}).touch()
class Zero(torch.nn.Module):
    def forward(self, view, batch=None):
        return {{"loss": 0 * view.logits.sum()}}
"""


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """A finished run, not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(photos), *TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture
def foreign(trained, tmp_path):
    """Makes a copy of the run whose config.yaml says something else: foreign(data="s3://...")."""

    def foreign(**changes):
        copy = tmp_path / "foreign"
        shutil.copytree(trained, copy)
        config = yaml.safe_load((copy / "config.yaml").read_text())
        (copy / "config.yaml").write_text(yaml.safe_dump(config | changes))
        return copy

    return foreign


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """(the import path of an objective, the file that its module makes when it is imported)"""
    mark = tmp_path / "imported"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/planted_code.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    return "planted_code:Zero", mark


def test_weights_of_a_run_bring_no_code(photos, foreign, planted, tmp_path, capsys):
    name, mark = planted
    source = foreign(objectives={"hard": {}, name: {}})
    words = ["train", str(photos), "--weights", str(source), *TINY[4:], "--out", str(tmp_path / "out")]
    for more in ([], ["--set", "objectives.hard.smoothing=0.2"]):
        assert main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert str(source / "config.yaml") in said
        assert name in said
        assert "--trust-code" in said
        assert len(said.splitlines()) == 1
    assert main([*words, "--set", "objectives={hard: {}}"]) == 0
    assert not mark.exists()


def test_trusted_code_trains_and_is_asked_for_again_when_the_run_goes_on(photos, foreign, planted, tmp_path, capsys):
    name, mark = planted
    out = tmp_path / "out"
    words = ["train", str(photos), "--weights", str(foreign(objectives={name: {}})), *TINY[4:], "--out", str(out)]
    assert main([*words, "--trust-code"]) == 0
    assert mark.exists()
    capsys.readouterr()
    assert main([*words, "--epochs", "2"]) == 2
    assert f"{out / 'config.yaml'} names the objective {name!r}" in capsys.readouterr().err
    assert main([*words, "--epochs", "2", "--trust-code"]) == 0
    assert "Zero" in (out / "log.txt").read_text()


def test_a_recipe_file_brings_no_code_and_cannot_trust_itself(photos, planted, tmp_path, capsys):
    name, mark = planted
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"objectives": {name: {}}, "trust_code": True}))
    words = ["train", str(photos), *TINY, "--recipe", str(recipe), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"{recipe} names the objective {name!r}" in capsys.readouterr().err
    with pytest.raises(EverytokenError, match="trust_code=True"):
        train(photos, recipe=str(recipe))
    assert not mark.exists()
    assert main([*words, "--trust-code"]) == 0
    assert mark.exists()


def test_code_that_is_typed_needs_no_trust(photos, planted, tmp_path):
    name, mark = planted
    words = ["train", str(photos), *TINY, "--set", f"objectives.{name}={{}}"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert mark.exists()


def test_the_recipe_in_an_output_folder_brings_no_code(planted, tmp_path):
    """Of training that decides itself, which reads it again."""
    from everytoken_lab.engine.options import TrainOptions
    from everytoken_lab.training.auto import read_tuning

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"objectives": {planted[0]: {}}}))
    with pytest.raises(EverytokenError, match="--trust-code"):
        read_tuning(tmp_path, TrainOptions())
    assert read_tuning(tmp_path, TrainOptions(), trust_code=True).objectives == {planted[0]: {}}


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "eval", "predict", "explain", "export", "robust", "sheet"])
def test_output_files_replace_planted_links(command, trained, photos, photo_maps, tmp_path):
    """Each file that the command writes is a link to something precious when it is run again."""
    image, victim = str(photos / "val/class-0/photo.0.png"), tmp_path / "victim"
    words = {
        "report": ["report", str(trained), "--out", "OUT/report.html"],
        "eval": ["eval", str(trained), str(photos), "--out", "OUT/numbers"],
        "predict": ["predict", str(trained), image, "--out", "OUT/a.csv", "--pictures", "OUT"],
        "explain": ["explain", str(trained), image, "--out", "OUT"],
        "export": ["export", str(trained), "--to", "timm", "--out", "OUT"],
        "robust": ["robust", str(trained), "--suite", f"val={photos}", "--workers", "0", "--out", "OUT"],
        "sheet": ["maps", "sheet", str(photo_maps), "--count", "2", "--out", "OUT/sheet.png"],
    }[command]
    victim.write_text("precious")
    clean, dirty = tmp_path / "clean", tmp_path / "dirty"
    for folder in (clean, dirty):
        folder.mkdir()
    assert not main([word.replace("OUT", str(clean)) for word in words])
    names = [path.relative_to(clean) for path in clean.rglob("*") if path.is_file()]
    assert names
    for name in names:
        (dirty / name).parent.mkdir(parents=True, exist_ok=True)
        (dirty / name).symlink_to(victim)
    assert not main([word.replace("OUT", str(dirty)) for word in words])
    assert victim.read_text() == "precious"
    assert [name for name in names if (dirty / name).is_symlink()] == []


TRAIN = ["train", "PHOTOS", *TINY, "--out", "OUT"]
LINKED = {  # what is a link in the folder OUT, or in the run RUN, that a command writes to
    **dict.fromkeys(("log.txt", "checkpoints"), TRAIN),
    "tensorboard": [*TRAIN, "--tensorboard"],
    "wandb": [*TRAIN, "--wandb", "birds"],
    **{name: ["train", "PHOTOS", "--out", "OUT"] for name in ("features", "fine-tuned", "linear", "maps")},
    "export": ["export", "RUN", "--to", "timm"],
    "robust": ["robust", "RUN", "--suite", "val=PHOTOS"],
    "class-0": ["predict", "RUN", "PHOTOS/val", "--pictures", "OUT"],
}


@pytest.mark.parametrize("name", LINKED)
def test_commands_stop_at_a_planted_link_that_they_would_follow(name, foreign, photos, tmp_path, monkeypatch, capsys):
    if name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words, elsewhere = LINKED[name], tmp_path / "elsewhere"
    places = {"PHOTOS": photos, "RUN": foreign(), "OUT": tmp_path / "out"}
    places["OUT"].mkdir()
    link = places["OUT" if "OUT" in words else "RUN"] / name
    elsewhere.write_text("precious") if "." in name else elsewhere.mkdir()
    link.symlink_to(elsewhere)
    for word, place in places.items():
        words = [text.replace(word, str(place)) for text in words]
    assert main(words) == 2
    assert f"{link} is a link" in capsys.readouterr().err
    assert elsewhere.read_text() == "precious" if elsewhere.is_file() else not list(elsewhere.iterdir())


def test_training_begins_metrics_anew_that_are_a_planted_link(photos, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "precious")
    assert main(["train", str(photos), *TINY, "--out", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run/metrics.jsonl").is_symlink()
    assert (tmp_path / "precious").read_text() == "precious"


def test_output_is_written_by_one_module():
    """`everytoken.files`: no plain writing anywhere else, which would follow links and could be torn."""
    home = ("everytoken/files.py", "everytoken_lab/data/archives.py")  # the latter in files that `open_new` made
    assert [f"{name}:{call.lineno}" for name, call in calls() if name not in home and writes(call)] == []


def writes(call):
    """Whether a call writes to a path: write_text, open(..., "a"), shutil.copy, picture.save(path) and so on."""
    method = isinstance(call.func, ast.Attribute)
    name, owner = (call.func.attr, ast.unparse(call.func.value)) if method else (ast.unparse(call.func), "")
    words = [word.value for word in (*call.args, *(k.value for k in call.keywords)) if isinstance(word, ast.Constant)]
    if name == "open":
        modes = [word for word in words if isinstance(word, str) and re.fullmatch("[rwaxbt+]{1,4}", word)]
        return any(set(mode) & set("wax+") for mode in modes)
    if name.startswith("save") and call.args and ast.unparse(call.args[0]) == "file":
        return False  # which is open
    if owner == "np" and name.startswith("save"):
        return True
    if name == "save":  # of Pillow: to a file that is open, with its format
        ours = not owner or re.fullmatch(r"self|_?answers.*|out_of_fold|saved\[0\]|.*predictions|dcp|torch.*", owner)
        return bool(call.args) and not ours and not {"PNG", "JPEG"} & set(words)
    plain = ("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "tofile", "memmap")
    return name in plain or (owner == "shutil" and name.startswith("copy"))


@pytest.mark.parametrize(
    "code",
    [
        *("path.write_text(x)", "Path(a).write_bytes(x)", "open(p, 'a')", "path.open(mode='r+b')", "open(p, 'wb')"),
        *("picture.save(path)", "draw(x).save(a / 'b.png', quality=88)", "shutil.copyfile(a, b)", "mark.touch()"),
        *("np.save(path, array)", "np.savez(folder / 'a.npz', x=x)"),
    ],
)
def test_plain_writing_would_be_found(code):
    assert writes(ast.parse(code, mode="eval").body)


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ftp", "http"])
def address(request, listener):
    """(the address of an archive, the connections to its server)"""
    if request.param == "http":
        pytest.importorskip("aiohttp")
    host, heard = listener
    return f"{request.param}://{host}/photos.tar", heard


def test_no_command_opens_an_address_because_a_run_names_it(address, foreign, photos, tmp_path, capsys):
    data, heard = address
    run, image = str(foreign(data=data)), str(photos / "val/class-0/photo.0.png")
    Path(run, "calibration.json").unlink(missing_ok=True)
    refusal = f"{run}/config.yaml says that its images are at {data}, and no address is opened"
    assert main(["eval", run]) == 2
    assert refusal in capsys.readouterr().err
    told = {
        "predict": ["predict", run, image],
        "report": ["report", run, "--out", str(tmp_path / "report.html")],
        "export": ["export", run, "--to", "timm", "--out", str(tmp_path / "export")],
        "explain": ["explain", run, image, "--out", str(tmp_path / "pictures")],
    }
    for command, words in told.items():
        assert main(words) in (0, None)
        said = capsys.readouterr()
        assert (refusal in said.out + said.err) == (command in ("predict", "report", "export"))
    assert heard == []
    assert main(["eval", run, data]) == 2  # typed: it is asked
    assert heard


# -- secrets, and what reaches the screen -----------------------------------------------------------------------------

SIGNED = "https://me:S3CRET@host/a/train.tar?X-Amz-Signature=S3CRET"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"{SIGNED}: no", "https://host/a/train.tar no"),
        (f"'{SIGNED}' and s3://key:S3CRET@bucket/x", "'https://host/a/train.tar' and s3://bucket/x"),
        ("s3://bucket/train-?.tar and a@b.c", "s3://bucket/train-?.tar and a@b.c"),
        ("\x1b[2Ja\rb\x9b\u202ec\x07", "\\u001b[2Ja\\u000db\\u009b\\u202ec\\u0007"),
        ("two\nlines\tand caf\udce9", "two\nlines\tand caf\\xe9"),
    ],
)
def test_people_see_neither_secrets_nor_what_steers_a_terminal(text, seen, capsys):
    schema.say(text)
    assert capsys.readouterr().out == f"{seen}\n"


def test_text_is_printed_by_one_function():
    """`schema.say`: nothing else prints names that come from outside."""
    printing = ("print", "sys.stdout.write", "sys.stderr.write")
    found = [name for name, call in calls() if ast.unparse(call.func) in printing]
    assert sorted(found) == [*["everytoken_lab/demo/images.py"] * 2, "everytoken_lab/schema.py"]


def test_a_page_a_card_and_the_record_of_a_start_have_no_secrets(foreign, tmp_path, monkeypatch, capsys):
    run = foreign(data=SIGNED)
    monkeypatch.setattr(sys, "argv", ["everytoken", "train", SIGNED])
    RunFolder(run).write_config(yaml.safe_load((run / "config.yaml").read_text()))
    assert main(["report", str(run), "--out", str(tmp_path / "report.html"), "--samples", "0"]) == 0
    assert main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    pages = [tmp_path / "report.html", tmp_path / "out/README.md", run / "environment.json"]
    for text in (said.out, said.err, *(page.read_text() for page in pages)):
        assert "S3CRET" not in text
    assert "S3CRET" in (run / "config.yaml").read_text()  # with which the run goes on


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "a\nb: 100 %"])
def test_names_of_files_and_classes_stay_in_their_line(name, trained, photos, tmp_path, capsys):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(photos / "val/class-0/photo.0.png", folder / "photo.png")
    assert main(["predict", str(trained), str(folder), "-j", "0", "--device", "cpu"]) == 0
    assert main(["predict", str(trained), str(folder / "none.png")]) == 2
    said = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", said.out + said.err)
    assert len([line for line in said.out.splitlines() if line]) == 1
    assert main(["explain", str(trained), str(folder / "photo.png"), "--out", str(tmp_path / "out")]) == 0  # is drawn


# -- hangs ------------------------------------------------------------------------------------------------------------


def test_input_is_read_by_one_module():
    """`everytoken.files`: no plain reading anywhere else, which would wait for pipes and read devices for ever."""
    home = ("everytoken/files.py", "everytoken_lab/machine.py")  # the latter in /proc and /sys
    texts = [(name, ast.unparse(call)) for name, call in calls() if name not in home]
    reads = re.compile(r"\.read_(text|bytes)\(|^open\(|\.open\(['\"]r")
    found = [f"{name}: {text[:60]}" for name, text in texts if reads.search(text) and "resources.files" not in text]
    assert [line for line in found if "files.read_bytes" not in line] == []


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_neither_read_nor_appended_to(kind, photos, foreign, tmp_path):
    run, image = foreign(), tmp_path / "a.jpg"
    for path in (run / "config.yaml", run / "metrics.jsonl", image):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    words = "a folder, not a file" if kind == "folder" else "not a regular file"
    assert [words in trouble for trouble in read_run(run).troubles][:2] == [True, True]
    with pytest.raises(ImageError, match=words):
        Picture(image, "a.jpg")
    with pytest.raises(ImageError, match=words):
        read_header(image, "a.jpg")
    if kind != "device":  # which is a link, and refused as one
        with pytest.raises(OSError, match=words):
            files.append(image, b"x")


def test_yaml_has_no_aliases_neither_read_nor_written():
    for text in ("a: &x [1]\nb: *x\n", "a: &x {b: 1}\nc:\n  <<: *x\n", "&a [*a]\n"):
        with pytest.raises(EverytokenError, match=r"mine\.yaml.*line \d.*aliases"):
            schema.read_yaml(text, "mine.yaml")
    with pytest.raises(EverytokenError, match="characters"):
        schema.read_yaml("x" * 2_000_000, "mine.yaml")
    shared = {"prob": 1.0}
    assert schema.read_yaml(schema.to_yaml({"a": shared, "b": shared}), "ours") == {"a": shared, "b": shared}


def tar_member(size, kind=b"0", content=b""):
    info = tarfile.TarInfo("a/1.png")
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    "content",
    [
        tar_member(-512),
        tar_member(1 << 87),
        tar_member(-512, b"L"),
        tar_member(200_000, b"x", b"1" * 200_000) + tar_member(3, content=b"abc"),
        tar_member(22, b"x", b"29 size=99999999999999999"[:22]) + tar_member(3, content=b"abc"),
        tar_member(13, b"x", b"13 size=-512\n") + tar_member(3, content=b"abc"),
        tar_member(3, content=b"abc") + b"\xff" * 512 + tar_member(3, content=b"abc"),
    ],
    ids=["negative", "huge", "negative name", "digits", "cut pax", "negative pax", "damage in the middle"],
)
def test_a_tar_header_that_lies_is_refused(content, tmp_path):
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    with pytest.raises(EverytokenError, match=r"a\.tar"):
        ArchiveReader([tmp_path / "a.tar"])


def test_the_second_ctrl_c_ends_at_once_and_without_a_traceback():
    code = """
import os, signal, sys, time
from everytoken_lab import cli
def work(*_):
    try:
        os.kill(os.getpid(), signal.SIGINT); time.sleep(60)
    finally:  # puts things away
        if "twice" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT); time.sleep(60)
cli._choose = work
sys.exit(cli.main())
"""
    for more, said in (([], "everytoken: interrupted\n"), (["twice"], "")):
        done = subprocess.run(
            [sys.executable, "-c", code, *more], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (130, said)


def test_a_loader_process_that_is_found_dead_when_an_epoch_begins_is_named():
    workers = Workers(SimpleNamespace(), [[0]], 0)

    class Dead:
        _iterator = None

        def __iter__(self):
            raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")

    workers.loader = Dead()
    with pytest.raises(WorkerError, match="pid 17"):
        next(iter(workers))


def test_a_dead_proxy_is_told_at_once(monkeypatch, tmp_path):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(EverytokenError, match="cannot be downloaded"), _downloading("hf-hub:nobody/nothing"):
        raise AssertionError("it was tried")


@pytest.mark.parametrize(
    "changes",
    [{"model_args": {"embed_dim": "x"}}, {"model_args": {"img_size": "x"}}, {"pretrained_cfg": {"input_size": 5}}],
)
def test_a_folder_of_timms_form_that_is_wrong_is_told_in_a_sentence(changes, tmp_path):
    config = {"architecture": "vit_nano_patch4_32", "num_classes": 3, "model_args": {}, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EverytokenError, match="cannot be built"):
        open_model(f"local-dir:{tmp_path}")


# -- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["objectives.hard.weight=.inf", "mixing.cutmix.alpha=.nan", "lr=.nan", "mixing.cutmix.odds=.inf"]
)
def test_settings_are_finite(text):
    values = overrides([text], {})
    with pytest.raises(EverytokenError, match=f"{text.partition('=')[0]} is (nan|inf)"):
        apply(TrainOptions(), values, "--set")


@pytest.mark.parametrize("odds", ["x", {}, -1, float("nan"), float("inf"), None])
def test_odds_of_mixers_are_numbers(odds):
    with pytest.raises(EverytokenError, match="odds"):
        build_mixer({"cutmix": {"odds": odds}, "mixup": {}})


@pytest.mark.parametrize(("name", "value"), [("mean", float("nan")), ("std", 1e-300), ("std", float("inf"))])
def test_weights_are_prepared_for_with_numbers(name, value):
    with pytest.raises(EverytokenError, match=name):
        Description.from_values({"architecture": "vit_nano_patch4_32", name: [value] * 3}, "a.safetensors")
