"""Training with score maps through the command line: matching classes, foreign classes, ReLabel, online labeling."""

import json

import numpy as np
import pytest

from everytoken.maps import MapWriter, ScoreMap, StoreMeta
from everytoken_lab.cli import main
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.models.open import open_model

TINY = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--workers", "0", "--batch-size", "12", "--epochs", "1"),
    *("--warmup-epochs", "0", "--lr", "0.001", "--log-interval", "1", "--threads", "1", "--device", "cpu"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"),
]


def make_store(photos, path, names, grid=(5, 6), top=2):
    data = open_dataset(photos, "train")
    rng = np.random.default_rng(0)
    keys = [data.key(i) for i in range(len(data))]
    top = min(top, len(names))
    with MapWriter(path, keys, StoreMeta(grid, top, tuple(names))) as writer:
        for key in writer.pending_keys():
            classes = np.stack([rng.permutation(len(names))[:top] for _ in range(grid[0] * grid[1])]).reshape(
                *grid, top
            )
            scores = np.sort(rng.normal(3, 1, (*grid, top)))[..., ::-1].astype(np.float16)
            size = data.load(keys.index(key)).size
            writer.write({key: ScoreMap(scores, classes.astype(np.uint16), size)})
        writer.finalize()
    return path


@pytest.fixture(scope="module")
def own(photos, tmp_path_factory):
    return make_store(photos, tmp_path_factory.mktemp("maps") / "own", ["class-0", "class-1", "class-2"])


@pytest.fixture(scope="module")
def foreign(photos, tmp_path_factory):
    return make_store(photos, tmp_path_factory.mktemp("maps") / "foreign", [f"thing {i}" for i in range(9)])


@pytest.mark.parametrize("mixing", ["mixtoken: {}", "mixup: {}", "compose: {mixup: {}, mixtoken: {}}"])
def test_token_labeling_trains_with_every_kind_of_mixing(photos, own, tmp_path, mixing):
    words = ["--maps", str(own), "--set", "objectives.token_labeling={beta: 0.5}", "--set", f"mixing={{{mixing}}}"]
    assert main(["train", str(photos), *TINY, *words, "--out", str(tmp_path)]) == 0
    assert {"token_labeling/class", "token_labeling/token"} <= set(read_run(tmp_path).terms)
    loaded = open_model(tmp_path)
    assert loaded.info.token_class_names == ("class-0", "class-1", "class-2")
    assert loaded.model.token_head is not None
    assert main(["eval", str(tmp_path), str(photos), "--token-vote", "0.5", "--workers", "0", "--device", "cpu"]) == 0


def test_a_run_is_validated_and_evaluated_with_its_token_vote(photos, own, tmp_path, capsys):
    words = ["--maps", str(own), "--set", "objectives.token_labeling={beta: 1.0}", "--token-vote", "50"]
    assert main(["train", str(photos), *TINY, *words, "--out", str(tmp_path)]) == 0
    validated = read_run(tmp_path).history[-1]["val_loss"]
    capsys.readouterr()
    losses = []
    for more in ([], ["--token-vote", "0"]):
        words = ["--workers", "0", "--device", "cpu", "--json", *more]
        assert main(["eval", str(tmp_path), str(photos), *words]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(validated, rel=1e-4)
    assert losses[1] != pytest.approx(validated, rel=0.1)


def test_a_token_vote_without_tokens_that_know_the_classes_is_refused(photos, foreign, tmp_path, capsys):
    for words in ([], ["--maps", str(foreign), "--set", "objectives.token_labeling={}"]):
        assert main(["train", str(photos), *TINY, *words, "--token-vote", "0.5", "--out", str(tmp_path)]) == 2
        assert "token_vote is 0.5" in capsys.readouterr().err


def test_the_released_switch_trains_with_geometric_augmentation_and_wants_square_maps(photos, own, tmp_path, capsys):
    square = make_store(photos, tmp_path / "maps", ["class-0", "class-1", "class-2"], grid=(6, 6))
    released = ["--aa", "rand-m9-mstd0.5-inc1-n3", "--set", "objectives.token_labeling={released: true}"]
    words = ["train", str(photos), *TINY, *released, "--out", str(tmp_path / "run")]
    assert main([*words, "--maps", str(own)]) == 2
    assert "released=true" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--maps", str(square)]) == 0


@pytest.mark.parametrize("target", ["", "class_target: both, rho: 0.5"])  # as recipes say for maps of the own classes
def test_foreign_classes_teach_the_tokens_and_the_folders_the_class_token(photos, foreign, tmp_path, capsys, target):
    words = ["--maps", str(foreign), "--set", f"objectives.token_labeling={{{target}}}", "--out", str(tmp_path)]
    assert main(["train", str(photos), *TINY, *words]) == 0
    assert "the maps have 9 classes" in capsys.readouterr().out
    description = open_model(tmp_path).info
    assert len(description.token_class_names) == 9
    assert description.class_names == ("class-0", "class-1", "class-2")


def test_relabel_needs_matching_classes_and_says_so(photos, own, foreign, tmp_path, capsys):
    words = ["--set", "objectives.relabel={}", "--out", str(tmp_path / "r")]
    assert main(["train", str(photos), *TINY, "--maps", str(own), *words]) == 0
    assert main(["train", str(photos), *TINY, "--maps", str(foreign), *words, "--out", str(tmp_path / "s")]) == 2
    assert "9 classes" in capsys.readouterr().err


def test_a_trained_run_teaches_online_and_by_distillation(photos, tmp_path):
    assert main(["train", str(photos), *TINY, "--out", str(tmp_path / "teacher")]) == 0
    teacher = ["--teacher", str(tmp_path / "teacher")]
    for name in ("online_token", "distillation"):
        words = [*teacher, "--set", f"objectives.{name}={{}}", "--out", str(tmp_path / name)]
        assert main(["train", str(photos), *TINY, *words]) == 0
        assert any(key.startswith(name) for key in set(read_run(tmp_path / name).terms))


def test_stored_features_teach_and_score_maps_are_no_features(photos, foreign, tmp_path, capsys):
    words = ["train", str(photos), *TINY, "--set", "objectives.feature_distillation={}", "--out", str(tmp_path / "run")]
    assert main([*words, "--maps", str(foreign)]) == 2
    assert "keeps the best 2 of 9 classes, so these are no features" in capsys.readouterr().err
    features = make_store(photos, tmp_path / "features", [f"channel {i}" for i in range(4)], top=4)
    assert main([*words, "--maps", str(features)]) == 0
    assert "feature_distillation/token" in set(read_run(tmp_path / "run").terms)


def test_the_network_that_fit_has_kept_can_teach(photos, backbone, tmp_path):
    fit = ["--annotator", "fit", "--fit-model", backbone, "--workers", "0", "--device", "cpu"]
    assert main(["annotate", str(photos), "--out", str(tmp_path / "maps"), *fit]) == 0
    words = ["--teacher", str(tmp_path / "maps/annotator"), "--set", "objectives.online_token={}"]
    assert main(["train", str(photos), *TINY, *words, "--out", str(tmp_path / "run")]) == 0
    assert "online_token/token" in set(read_run(tmp_path / "run").terms)
