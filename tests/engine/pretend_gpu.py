"""A GPU that is not there: tensors that say they are on one, and are computed on the CPU.

    with PretendGpu() as gpu:
        loss = step(batch.to("cuda", non_blocking=True))
    assert gpu.waits == {}

Unlike fake tensors they have values, so code whose shapes depend on values runs, too, and results can be compared with
the CPU's. An operator that mixes devices is an error, and those for which a host waits are counted by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# the number of results, or a value, has to come to the host first
ASKING = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    torch.ops.torchvision.nms.default: "nms",
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class OnGpu(torch.Tensor):
    """A tensor with a device that is not there and values that are."""

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls, value.size(), value.stride(), value.storage_offset(), dtype=value.dtype, device=CUDA
        )

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"OnGpu({self.value})"

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendGpu.running(func, types, args, kwargs)  # in another thread


class PretendGpu(TorchDispatchMode):
    """Makes "cuda" a device.

    Attributes:
        waits: how often the host waited, by what for.
    """

    running: Callable

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # or torch would look for a driver
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> PretendGpu:
        torch._C._ensureCUDADeviceGuardSet()
        self._settings = ExitStack()
        self._settings.enter_context(torch.backends.cudnn.flags(enabled=False))  # the CPU has other kernels
        self._settings.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies a tensor of the host
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `module.to` makes new parameters
        PretendGpu.running = self.__torch_dispatch__
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)
        self._settings.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        super().__enter__()
        out = func.decompose(*args, **kwargs)  # in inference mode, operators come that are made of others
        super().__exit__(None, None, None)
        if out is not NotImplemented:
            return out
        flat: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, flat.append, (args, kwargs))
        device = kwargs.pop("device", None)
        on_gpu = [isinstance(t, OnGpu) for t in flat]
        to_gpu = torch.device(device).type == "cuda" if device is not None else any(on_gpu)
        if func in COPIES and len({to_gpu, *on_gpu}) == 2:
            source = flat[-1]
            if not kwargs.get("non_blocking") and not (len(args) > 2 and args[2]) and source.numel():
                self.waits["to the host" if isinstance(source, OnGpu) else "to the GPU"] += 1
        elif any(on_gpu):
            mixed = flat[:1] + flat[-1:] if func in INDEXING else flat  # indices may be on the host
            strange = [t for t in mixed if t.dim() and not isinstance(t, OnGpu)]
            assert not strange, f"{func}: tensors on the GPU and on the host, {[tuple(t.shape) for t in flat]}"
            self._count(func, args)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map_only(OnGpu, lambda t: t.value, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if not to_gpu:
            return out
        out = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, OnGpu) else OnGpu(t), out)
        return return_and_correct_aliasing(func, args, kwargs, out) if any(on_gpu) else out

    def _count(self, func, args) -> None:
        if func in ASKING:
            self.waits[ASKING[func]] += 1
        elif func in INDEXING:
            indices = [index for index in args[1] if index is not None]
            self.waits["to the GPU"] += any(not isinstance(index, OnGpu) for index in indices)
            filled = len(args) > 2 and args[2].dim() == 0 and not isinstance(args[2], OnGpu)  # by a number: masked_fill
            self.waits["index by bools"] += not filled and any(i.dtype in (torch.bool, torch.uint8) for i in indices)
