"""What only exists on CUDA, as far as a CPU can run it: devices, streams, kernels, a second attention."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from everytoken.data.batch import Batch, Prefetcher
from everytoken.models.align import fused
from everytoken_lab.engine import distributed
from everytoken_lab.engine.distributed import join_world, kernel_settings


@pytest.mark.parametrize(("visible", "device"), [(1, 0), (8, 3)])
def test_a_process_takes_its_own_gpu_or_the_only_one_that_it_sees(monkeypatch, visible, device):
    asked = {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: asked.update(device=number))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, timeout: asked.update(backend=backend))
    with join_world("cuda") as world:
        assert (world.rank, world.size, world.device) == (3, 4, torch.device("cuda", device))
    assert asked == {"device": device, "backend": "cpu:gloo,cuda:nccl"}


def test_kernels_are_set_for_a_training_and_then_as_they_were():
    def settings():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    assert settings() == ("highest", False)
    with kernel_settings(torch.device("cuda")):
        assert settings() == ("high", True)
    with kernel_settings(torch.device("cpu")):
        assert settings() == ("highest", False)
    assert settings() == ("highest", False)


def test_the_prefetcher_copies_on_its_own_stream_and_each_side_waits_for_the_other(monkeypatch):
    events = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copy"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: events.append(f"used on {stream.name}"))
    prefetcher = Prefetcher((Batch(torch.full((1,), k)) for k in range(3)), "cuda", (0.0,) * 3, (1.0,) * 3)
    monkeypatch.setattr(prefetcher, "_ready", lambda batch: events.append(f"copy {int(batch.images)}") or batch)
    for batch in prefetcher:
        events.append(f"work {int(batch.images)}")
    handed = ["main waits for copy", "used on main"]
    assert events == [
        *("copy waits for main", "copy 0"),
        *(*handed, "copy waits for main", "copy 1", "work 0"),
        *(*handed, "copy waits for main", "copy 2", "work 1"),
        *(*handed, "work 2"),
    ]


def test_the_second_attention_call_with_narrow_values_as_on_cuda_gives_the_same_shares(monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 7, 16).unbind(0)
    shares = torch.rand(2, 7, 1)
    out, mixed = fused.attend(shares, False, q, k, v)
    monkeypatch.setattr(fused, "second_width", lambda query, count: 8)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's other kernel wants V as wide as Q
        again = fused.attend(shares, True, q, k, v)
    torch.testing.assert_close(again[0], out)
    torch.testing.assert_close(again[1], mixed)
