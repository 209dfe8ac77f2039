"""Loading weights: released layouts, other sizes and classes, and files that must not be opened."""

import os
import pickle

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import everytoken  # noqa: F401
from everytoken.models.weights import WeightsError, encode_weights, load_weights, read_weights

SMALL = {"img_size": 64, "num_classes": 5}
SIZES = {"embed_dim": 48, "depth": 2, "num_heads": 3}
MODELS = {
    "lvvit_t": SIZES,
    "t2t_vit_7": {**SIZES, "token_dim": 16},
    "cvt_13": {"embed_dims": (8, 16, 24), "depths": (1, 1, 2), "num_heads": (1, 2, 3)},
}


def tiny(name="lvvit_t", **kwargs):
    return timm.create_model(name, **{**SMALL, **MODELS[name], **kwargs})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3, "arch": "lvvit_t"},
        lambda s: {"state_dict_ema": s, "state_dict": {k: v * 0 for k, v in s.items()}},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {f"module.{k}": v for k, v in s.items()},
    ],
    ids=["bare", "state_dict", "ema", "model and module", "module"],
)
@pytest.mark.parametrize("name", MODELS)
def test_released_layouts_load_completely(tmp_path, name, wrap):
    source, target = tiny(name), tiny(name)
    torch.save(wrap(source.state_dict()), tmp_path / "w.pth.tar")
    report = load_weights(target, tmp_path / "w.pth.tar")
    assert [*report.left_out, *report.missing, *report.unknown, *report.resized] == []
    for key, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[key])
    report = load_weights(tiny(name, num_classes=3), wrap(source.state_dict()))
    assert {r.split(".")[0] for r in report.left_out} == {"head"} | ({"aux_head"} if name == "lvvit_t" else set())


def test_other_resolution_and_classes_are_fitted_and_told(tmp_path):
    save_file(tiny().state_dict(), tmp_path / "w.safetensors")
    target = tiny(img_size=(96, 64), num_classes=7)
    report = load_weights(target, tmp_path / "w.safetensors")
    assert [r.split(" ")[0] for r in report.resized] == ["pos_embed"]
    heads = {f"{head}.{part}" for head in ("head", "aux_head") for part in ("weight", "bias")}
    assert {r.split(" ")[0] for r in report.left_out} == heads
    assert "do not fit" in str(report)
    assert "resized" in str(report)


@pytest.mark.parametrize("name", ["lvvit_t", "t2t_vit_7"])
def test_positions_are_resized_bicubically_and_the_class_slot_is_kept(name):
    source, target = tiny(name), tiny(name, img_size=128)
    torch.nn.init.normal_(source.pos_embed)
    load_weights(target, source.state_dict())
    grid = source.pos_embed[:, 1:].reshape(1, 4, 4, 48).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)
    assert torch.allclose(target.pos_embed[:, 1:], wanted.permute(0, 2, 3, 1).reshape(1, 64, 48), atol=1e-5)
    assert torch.equal(target.pos_embed[:, :1], source.pos_embed[:, :1])


def test_swin_tables_are_resized_too():
    source = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7, depths=(1, 1, 1, 1))
    target = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=8, depths=(1, 1, 1, 1))
    report = load_weights(target, source.state_dict())
    assert any("relative_position_bias_table" in name for name in report.resized)


def test_weights_of_another_architecture_are_refused():
    with pytest.raises(WeightsError, match="does not belong to"):
        load_weights(tiny(), timm.create_model("resnet18").state_dict())


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path):
    for writer in (torch.save, lambda o, p: pickle.dump(o, open(p, "wb"))):  # noqa: SIM115
        writer({"state_dict": _Evil(tmp_path / "ran")}, tmp_path / "evil.pth")
        with pytest.raises(WeightsError, match=r"evil\.pth"):
            load_weights(tiny(), tmp_path / "evil.pth")
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["torn.safetensors", "torn.pth"])
def test_torn_files_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x10\x00garbage")
    with pytest.raises(WeightsError, match=name):
        read_weights(tmp_path / name)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(WeightsError, match="no checkpoint at"):
        read_weights(tmp_path / "none.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(WeightsError, match="no tensors"):
        read_weights(tmp_path / "empty.pth")


def test_weights_carry_a_checksum_that_travels_with_copies(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.uint8)}
    metadata = {"everytoken": "{}", "more": "x"}
    data = encode_weights(tensors, metadata)
    assert all(encode_weights(tensors, metadata) == data for _ in range(5))
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(path).items())  # plain safetensors
    assert read_weights(path).keys() == tensors.keys()
    header = int.from_bytes(data[:8], "little") + 8
    for byte in (data.index(b"more"), data.index(b"F32"), header, len(data) - 1):
        changed = bytearray(data)
        changed[byte] ^= 1
        path.write_bytes(changed)
        with pytest.raises(WeightsError, match=r"w\.safetensors"):
            read_weights(path)


def test_weights_from_elsewhere_have_no_checksum_and_open(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "w.safetensors", metadata={"format": "pt"})
    assert read_weights(tmp_path / "w.safetensors")["a"].sum() == 3
