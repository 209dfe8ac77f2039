"""Settings of torch's GPU kernels while a run trains: TF32, cuDNN's search, deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kernel_settings(device: torch.device, deterministic: bool = False) -> Iterator[None]:
    """Kernels for a training on `device`; afterwards the settings are what they were.

    On CUDA, matrix products and convolutions of float32 tensors may use TF32 (10 bits of mantissa; what autocast runs
    in bfloat16 or float16 is not touched), and cuDNN tries its algorithms once per shape, as shapes stay the same.

    Args:
        deterministic: only kernels that repeat to the bit; cuDNN does not search, as the winner may change.
    """
    cudnn = torch.backends.cudnn
    before = (
        torch.get_float32_matmul_precision(),
        (cudnn.benchmark, cudnn.deterministic),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed buffer
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.benchmark, cudnn.deterministic = before[1]
        torch.use_deterministic_algorithms(before[2][0], warn_only=before[2][1])
