"""The public API: which names there are, that they say what they are, and that the first page's snippets run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional as F

import everytoken as et
import everytoken_lab as lab
from everytoken.functional import collate_maps

NAMES = {
    *("Maps", "ScoreMap", "MapWriter", "with_maps", "collate", "Batch", "TokenModel", "TokenView"),
    *("HardLabels", "TokenLabeling", "ReLabel", "OnlineTokenLabeling", "Distillation", "Drloc", "TLAlign", "TransMix"),
    *("CompactTarget", "FeatureDistillation"),
    *("CutMix", "MixUp", "MixToken", "Mix", "aligned", "TokenStep", "TokenTask"),
    *("EverytokenError", "__version__"),
}
LAB = {"annotate", "train", "evaluate", "predict", "explain", "export", "report", "load", "Run"}


def test_the_surface_is_this_and_every_name_has_a_docstring_with_an_example():
    assert set(et.__all__) == NAMES
    assert set(dir(et)) >= NAMES - {"EverytokenError", "__version__"}
    with pytest.raises(AttributeError, match="Mapps"):
        _ = et.Mapps
    assert set(lab.__all__) == LAB
    for package, name in [*((et, n) for n in NAMES - {"EverytokenError", "__version__"}), *((lab, n) for n in LAB)]:
        doc = getattr(package, name).__doc__
        assert doc, name
        assert len(doc.splitlines()) > 3, name


def test_looking_at_the_names_imports_no_torch():
    code = "import sys, everytoken as a, everytoken_lab as b; dir(a), dir(b); print({'torch', 'timm'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=10), token_classes=7).train()


@pytest.fixture
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([1, 2, 3, 9])


def test_the_loop_of_the_page_about_drloc_trains_its_network_too(images):
    page = (Path(__file__).parents[1] / "docs" / "drloc.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    names = {"loader": [(images, LABELS)] * 2}
    exec(code.replace("optimizer =", "before = [p.detach().clone() for p in step.parameters()]\noptimizer ="), names)
    step, model = names["step"], names["model"]
    assert not any("drloc" in key or "layers" in key for key in names["weights"])
    assert not any(torch.equal(a, b) for a, b in zip(names["before"], step.parameters(), strict=True))
    objectives = {"hard": et.HardLabels(smoothing=0.0), "drloc": step.objectives["drloc"]}
    torch.manual_seed(0)
    loss = et.TokenStep(model, objectives)(et.Batch(images, LABELS))["loss"]
    torch.manual_seed(0)
    view = model(images)
    torch.testing.assert_close(loss, F.cross_entropy(view.logits, LABELS) + objectives["drloc"](view)["loss"])


def test_token_labels_with_a_batch_made_by_hand(model, images):
    rng = np.random.default_rng(0)
    records = []
    for _ in range(4):
        classes = np.stack([rng.permutation(7)[:3] for _ in range(36)]).reshape(6, 6, 3).astype(np.uint32)
        scores = -np.sort(-rng.normal(2, 3, (6, 6, 3)), axis=-1).astype(np.float16)
        records.append(et.ScoreMap(scores, classes, (32, 32), (0.0, 0.0, 1.0, 1.0)))
    placement = torch.tensor([[[0.6, 0.0, 0.1], [0.0, 0.5, 0.3]]] * 4)  # a crop: network fractions -> image fractions
    batch = et.Batch(images, LABELS, placement=placement, maps=collate_maps(records, 7))
    result = et.TokenLabeling(beta=0.5, class_target="truth")(model(batch.images), batch)
    assert set(result) == {"loss", "class", "token"}
    result["loss"].backward()
    assert model.token_head.weight.grad.abs().sum() > 0
    mixed, _ = et.MixToken()(images, grid=(8, 8))
    assert mixed is images
    task = et.TokenTask(model, {"token_labeling": {"class_target": "truth"}}, verbose=False)
    assert task(batch)["output"].shape == (4, 10)


@pytest.mark.parametrize("mixer", [et.CutMix(), et.MixToken()])
def test_targets_are_mixed_as_the_model_was_told(model, images, mixer):
    """In a loop of one's own, giving the mix to the model is enough."""
    batch = et.Batch(images=images, labels=LABELS)
    mixed, mix = mixer(images) if isinstance(mixer, et.CutMix) else mixer(images, grid=(8, 8))
    hard = et.HardLabels(smoothing=0.0)
    loss = hard(model(mixed, mix), batch)["loss"]
    logits = model(mixed, mix).logits
    terms = [F.cross_entropy(logits, labels, reduction="none") for labels in (LABELS, LABELS[mix.partner])]
    torch.testing.assert_close(loss, (mix.ratio * terms[0] + (1 - mix.ratio) * terms[1]).mean())
    if mix.level == "tokens":
        with pytest.raises(et.EverytokenError, match=r"batch\.mix"):
            hard(model(images), et.Batch(images=images, labels=LABELS, mix=mix))


@pytest.mark.parametrize("call", ["evaluate", "predict", "explain", "report"])
def test_a_misspelt_option_is_named_with_the_nearest(call):
    with pytest.raises(et.EverytokenError, match="'device'"):
        getattr(lab, call)("runs/nowhere", "photos", devise="cpu")
