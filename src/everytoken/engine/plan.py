"""What a training of a given size needs: storage, bandwidth, cores and time, as a calculation from per-image costs.

The costs are measured (see `benchmarks/`) or given; the arithmetic is all here, so that it can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass

DATA_SETS = {"imagenet-1k": 1_281_167, "imagenet-21k": 14_197_122, "billion": 1_000_000_000}


@dataclass(frozen=True)
class Costs:
    """Per-image costs of the parts.

    Attributes:
        image_bytes: average size of an image file (ImageNet: 110 kB).
        map_cells, top_k, class_bytes: of a score map; a record also keeps about 40 bytes of facts and its key.
        key_bytes: average length of a key.
        loader_rate: images per second and core, decoded, augmented, with their maps.
        annotator_rate: images per second and device.
        train_rate: images per second and device.
        devices: that train or annotate together.
        weights: parameters of the model.
    """

    image_bytes: float = 110_000
    map_cells: int = 18 * 18
    top_k: int = 5
    class_bytes: int = 2
    key_bytes: float = 32
    loader_rate: float = 250.0
    annotator_rate: float = 100.0
    train_rate: float = 1000.0
    devices: int = 8
    weights: float = 26e6

    @property
    def map_bytes(self) -> float:
        """One record of a store: half-precision scores, class numbers, facts, key and index."""
        return self.map_cells * self.top_k * (2 + self.class_bytes) + 40 + self.key_bytes + 16


def plan(images: int, epochs: int, costs: Costs) -> dict[str, float]:
    """Amounts for `images` training images and `epochs` passes (bytes, bytes per second, hours, cores)."""
    rate = costs.train_rate * costs.devices
    return {
        "images": images,
        "image files, bytes": images * costs.image_bytes,
        "score maps, bytes": images * costs.map_bytes,
        "annotating, hours": images / (costs.annotator_rate * costs.devices) / 3600,
        "training, hours": images * epochs / rate / 3600,
        "images per second": rate,
        "reading images, bytes per second": rate * costs.image_bytes,
        "reading maps, bytes per second": rate * costs.map_bytes,
        "loader cores": rate / costs.loader_rate,
        "weights, gradients, optimizer and average, bytes per device": costs.weights * 4 * 5,
        "checkpoints kept, bytes": costs.weights * 4 * 5 * 2,
    }
