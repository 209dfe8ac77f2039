"""The page on token targets shows code; it has to run."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import timm
import torch
from torch import nn

import everytoken as et
from everytoken.maps import MapWriter, StoreMeta

PAGE = Path(__file__).parents[2] / "docs" / "token-targets.md"


class TwoHeads(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.class_head, self.token_head = nn.Linear(8, classes), nn.Linear(8, classes)

    def forward(self, images):
        grid = self.embed(images).permute(0, 2, 3, 1)
        return self.class_head(grid.mean((1, 2))), self.token_head(grid)


def test_the_snippet_of_the_page_trains_a_model_on_a_store(tmp_path, monkeypatch):
    rng, keys, K = np.random.default_rng(0), [f"cat/{i}.jpg" for i in range(4)], 20
    monkeypatch.chdir(tmp_path)
    with MapWriter("maps", keys, StoreMeta(grid=(6, 6), top_k=3, num_classes=K)) as writer:
        for shard in writer.pending_shards():
            for position in writer.shard_range(shard):
                classes = np.stack([rng.permutation(K)[:3] for _ in range(36)]).reshape(1, 6, 6, 3)
                scores = -np.sort(-rng.normal(2, 3, (1, 6, 6, 3)), axis=-1)
                writer.put([position], scores.astype("f2"), classes.astype("u2"), [(64, 48)], [(0, 0, 1, 1)])
        writer.finalize()
    torch.manual_seed(0)
    model = TwoHeads(K)
    before = model.token_head.weight.clone()
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    names = {
        "loader": [(keys, torch.randn(4, 3, 56, 56), torch.tensor([[[0.5, 0, 0.2], [0, 0.5, 0.1]]] * 4))] * 2,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(code, names)
    assert names["loss"].isfinite()
    assert not torch.equal(model.token_head.weight, before)


def test_the_snippets_about_dense_targets_and_features_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1:]
    assert len(blocks) == 3
    torch.manual_seed(0)
    model = et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=5), token_classes=5)
    images, keys = torch.randn(4, 3, 32, 32), ["a.jpg", "b.jpg"]
    view = model(images)
    made = []

    def create_model(name, **settings):
        made.append(name)
        return timm.create_model("test_resnet")

    names = {
        "et": et,
        "model": model,
        "batch": et.Batch(images),
        "keys": keys,
        "StoreMeta": StoreMeta,
        "timm": SimpleNamespace(create_model=create_model),
        "tokens_of": lambda key: np.random.randn(16, 16, 384),
        "class_logits": view.logits,
        "token_logits": view.token_logits,
        "labels": torch.arange(4),
        "soft": torch.rand(view.token_logits.shape).softmax(-1),
    }
    for block in blocks:
        exec(block, names)
        names["loss"].backward()
        names["loss"] = torch.zeros((), requires_grad=True)
    assert made == ["resnet50"]
    assert names["distillation"].projection.out_features == 384
