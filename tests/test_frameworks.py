"""The page about other training code: every block trains the backbone, and leaves plain timm weights."""

from pathlib import Path

import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
FIRST, *BLOCKS = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
TITLES = [part.split("\n")[0] for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]]
NEEDS = ["lightning", "transformers", "torchvision"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=TITLES)
def test_the_block_trains_every_weight_of_a_plain_timm_model(number, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS[number])
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
    loader = DataLoader(TensorDataset(images, labels), 8)
    columns = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    names = {"train_loader": loader, "val_loader": loader, "columns": columns}
    exec(FIRST, names)
    make = names["make_step"]

    def seeded():
        torch.manual_seed(0)
        return make()

    names["make_step"] = seeded
    before = seeded().model.backbone.state_dict()
    exec(BLOCKS[number], names)
    after = names["weights"]
    assert [name for name, value in before.items() if torch.equal(value, after[name].cpu())] == []
    timm.create_model("vit_nano_patch4_32", num_classes=10).load_state_dict(after)


def test_there_is_a_block_for_every_framework():
    assert len(BLOCKS) == len(TITLES) == len(NEEDS)
