"""Run the study: does every token pay, at a scale that two cores can run?

    python benchmarks/study/run.py WORK [--jobs 2] [--parts main vit] [--imagenette FOLDER]

WORK holds images, maps and run folders; it can be deleted afterwards. Results go to results.jsonl beside this file, one
line per finished run, from which `write.py` makes docs/results.md. Kill it at any moment; the same command goes on:
finished runs are not repeated, a run that was cut off goes on from its last checkpoint.

CIFAR-10 is found as in `everytoken demo`. Imagenette (train/ and val/ with folders of WordNet ids) must be given;
without it that part is left out. Annotators: `fit`, cross-fitted or not, and the ImageNet network of the extra
`registry`.
Accuracy is that of the last epoch, never the best one. Time is CPU time, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plan as study  # noqa: E402

RESULTS = HERE / "results.jsonl"
COMMAND = [sys.executable, "-m", "everytoken"]
_write = threading.Lock()


def finished() -> dict[str, dict]:
    """Results by key."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines() if line.strip()]
    return {row["key"]: row for row in rows}


def call(words: list[str], log: Path) -> float:
    """Run a command; its output goes to a file. Returns its CPU seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        process = subprocess.Popen([*COMMAND, *words], stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = log.read_text(errors="replace")[-800:]
        raise RuntimeError(f"everytoken {' '.join(words)} ended with {process.returncode}:\n{tail}")
    return usage.ru_utime + usage.ru_stime


def prepare(work: Path, imagenette: str, runs: list[study.Run]) -> None:
    """Images and maps that these runs need; what is there is left alone."""
    from everytoken.demo.images import find_images, write_tree

    needed = {r.data for r in runs} | {f"{r.data}-{r.maps}" for r in runs}
    needed |= {f"{r.data}-maps-fit" for r in runs if "--teacher" in r.words or r.maps == "maps-mean"}
    common = ["--workers", "0", "--device", "cpu"]
    fit = ["--annotator", "fit", *common]
    for name, count in ((study.CIFAR, 3000), ("cifar-10000", 10_000)):
        done = work / name / "done"
        if name in needed and not done.exists():
            shutil.rmtree(work / name, ignore_errors=True)
            write_tree(find_images(print), work / name, count, 5000)
            done.touch()
        for maps, words in (("maps-fit", []), ("maps-cross", ["--folds", "3"]), ("maps-top5", ["--top-k", "5"])):
            if f"{name}-{maps}" in needed:
                annotate(work / name, work / f"{name}-{maps}", [*fit, *words])
    if f"{study.CIFAR}-maps-mean" in needed:
        means(work / f"{study.CIFAR}-maps-fit", work / f"{study.CIFAR}-maps-mean")
    if f"{study.CIFAR}-maps-self" in needed:
        own = next(r for r in study.plan() if r.part == "main" and r.name == study.SELF)
        run = run_folder(own, work)
        annotate(work / study.CIFAR, work / f"{study.CIFAR}-maps-self", ["--annotator", f"self:{run}", *common])
    originals = work / f"{study.NETTE}-originals"
    if study.NETTE in needed:
        some(Path(imagenette), originals, 300)
        shrink(originals, work / study.NETTE)
    for name in (study.CIFAR, study.NETTE):
        if f"{name}-maps-image" in needed:
            image_label_everywhere(work / name, work / f"{name}-maps-image")
    if f"{study.NETTE}-maps-fit" in needed:
        words = [*fit, "--fit-size", "64", "--fit-epochs", "20"]
        annotate(work / study.NETTE, work / f"{study.NETTE}-maps-fit", words)
    lite = ["--annotator", "registry:efficientnet_lite0", "--img-size", "256", *common]
    for maps, words in (("maps-own", []), ("maps-foreign", ["--foreign-classes"])):
        if f"{study.NETTE}-{maps}" in needed:
            annotate(originals, work / f"{study.NETTE}-{maps}", [*lite, *words])


def image_label_everywhere(images: Path, out: Path) -> None:
    """Maps that know nothing about places: the folder's class in every cell."""
    import numpy as np

    from everytoken.data import open_dataset
    from everytoken.maps import MapWriter, StoreMeta

    if (out / "done").exists():
        return
    data = open_dataset(images, "train")
    names = data.class_names
    labels = {data.key(i): data.label(i) for i in range(len(data))}
    meta = StoreMeta(grid=(8, 8), top_k=5, class_names=names, annotator={"name": "the image's label everywhere"})
    with MapWriter(out, labels, meta) as writer:
        for at in range(len(labels)):
            classes = (labels[writer.key(at)] + np.arange(5)) % len(names)
            shape = (1, 8, 8, 5)
            scores = np.broadcast_to([10.0, 0, 0, 0, 0], shape)
            writer.put([at], scores, np.broadcast_to(classes, shape), [[0, 0]], [[0.0, 0.0, 1.0, 1.0]])
        writer.finalize()
    (out / "done").touch()


def means(source: Path, out: Path) -> None:
    """The maps of a store with the mean of all cells in every cell."""
    import numpy as np

    from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta

    if (out / "done").exists():
        return
    store = Maps(source)
    known = store.manifest
    meta = StoreMeta(known.grid, known.top_k, known.class_names, annotator={"name": "means"})
    if known.top_k != known.num_classes:
        raise RuntimeError(f"{source} does not keep all classes, so its means cannot be known")
    with MapWriter(out, list(store), meta) as writer:
        for key in writer.pending_keys():
            one = store[key]
            dense = np.zeros(one.scores.shape, np.float32)
            np.put_along_axis(dense, one.classes.astype(np.int64), one.scores.astype(np.float32), -1)
            mean = dense.mean((0, 1))
            order = np.argsort(-mean)
            shape = one.scores.shape
            made = ScoreMap(np.broadcast_to(mean[order], shape), np.broadcast_to(order, shape), one.size, one.area)
            writer.write({key: made})
        writer.finalize()
    (out / "done").touch()


def some(source: Path, target: Path, per_class: int) -> None:
    """The first images of each class for training, all of val."""
    if (target / "done").exists():
        return
    for folder in sorted(source.glob("*/*")):
        for path in sorted(folder.iterdir())[: per_class if folder.parent.name == "train" else None]:
            out = target / path.relative_to(source)
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out)
    (target / "done").touch()


def run_folder(run: study.Run, work: Path) -> Path:
    return work / "runs" / run.key.replace(" ", "-").replace(",", "")


def annotate(images: Path, out: Path, words: list[str]) -> None:
    if not (out / "done").exists():
        print(f"annotating {images.name} -> {out.name}", flush=True)
        call(["annotate", str(images), "--out", str(out), *words], out.with_suffix(".log"))
        (out / "done").touch()


def shrink(source: Path, target: Path) -> None:
    """Images with 72 pixels on the short side, so that reading them does not take longer than training on them."""
    from PIL import Image

    if (target / "done").exists():
        return
    for path in sorted(source.glob("*/*/*")):
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            scale = 72 / min(image.size)
            size = (round(image.width * scale), round(image.height * scale))
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC, reducing_gap=2).save(out, quality=95)
    (target / "done").touch()


def train(run: study.Run, work: Path) -> None:
    """One run, and its line in the results."""
    folder = run_folder(run, work)
    teacher = str(work / f"{run.data}-maps-fit")
    words = ["train", str(work / run.data), *study.MACHINE, *(w.replace("MAPS-FIT", teacher) for w in run.words)]
    words += ["--recipe", run.recipe] if run.recipe else [*study.COMMON, "--lr", str(run.lr)]
    words += ["--epochs", str(run.epochs), "--warmup-epochs", "2", "--seed", str(run.seed)]
    words += ["--val-interval", str(run.epochs), "--output", str(folder)]
    if run.maps:
        words += ["--labels", str(work / f"{run.data}-{run.maps}")]
    begun = time.time()
    log = folder.with_suffix(".log")
    cpu: float | None = call(words, log)
    if "going on from" in log.read_text(errors="replace"):
        cpu = None  # what the part before the interruption took is not known
    summary = json.loads((folder / "summary.json").read_text())
    from probe import halves

    with _write:  # the probe uses torch in this process
        own, other = halves(folder, work / run.data)
    last = summary["last"]
    row = {
        "key": run.key,
        "part": run.part,
        "name": run.name,
        "seed": run.seed,
        "top1": round(last["val_top1"], 2),
        "loss": round(last["val_loss"], 4),
        "ece": round(last["val_ece"], 2),
        "own_half": round(own, 2),
        "other_half": round(other, 2),
        "epochs": run.epochs,
        "updates": summary["updates"],
        "lr": run.lr,
        "train_seconds": round(summary["seconds"], 1),
        "cpu_seconds": cpu and round(cpu, 1),
        "code": version_of_code(),
        "words": " ".join(run.words),
    }
    with _write, RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(f"{run.key}: {row['top1']:.2f} %, own half {own:.1f} %, {time.time() - begun:.0f} s", flush=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def version_of_code() -> str:
    """Commit of the package that is run."""
    import everytoken

    words = ["git", "-C", str(Path(everytoken.__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=[])
    parser.add_argument("--names", nargs="+", default=[], help="only these rows; * stands for anything")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--imagenette", default="")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    runs = [r for r in {r.key: r for r in study.plan()}.values() if not given.parts or r.part in given.parts]
    runs = [r for r in runs if not given.seeds or r.seed in given.seeds]
    runs = [r for r in runs if not given.names or any(fnmatchcase(r.name, one) for one in given.names)]
    runs = [r for r in runs if r.data != study.NETTE or given.imagenette]
    done = finished()
    left = [r for r in runs if r.key not in done]
    print(f"{len(runs)} runs, {len(left)} to do", flush=True)
    if given.list:
        print("\n".join(r.key for r in left))
        return 0
    given.work.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prepare(given.work, given.imagenette, left)
    failures = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for run, future in [(run, pool.submit(train, run, given.work)) for run in left]:
            error = future.exception()
            if error is not None:
                failures += 1
                print(f"{run.key} failed: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
