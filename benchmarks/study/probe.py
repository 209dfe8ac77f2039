"""How well tokens say what is where: the left half of one validation image next to the right half of another.

The two come from different classes. Counted are the tokens that name the class of their own half, and those that name
the class of the other half; the difference is what they know about places. A model that says the same class everywhere
has a difference of 0, whatever it knows about classes.
Answers come from the token head if it speaks the data set's classes, otherwise from the class head at every token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everytoken.data import open_dataset
from everytoken.data.augment import EvalTransform
from everytoken.models.open import open_model


@torch.inference_mode()
def halves(run: Path, data: Path, pairs: int = 500) -> tuple[float, float]:
    """Parts of the tokens, in percent, that name the class of their own half and of the other half."""
    loaded = open_model(run)
    model, about = loaded.model.eval(), loaded.info
    images = open_dataset(data, "val")
    transform = EvalTransform(about.img_size, crop_pct=1.0, mean=about.mean, std=about.std)
    rng = np.random.default_rng(0)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (about.mean, about.std))
    counts, total = [0, 0], 0
    for _ in range(pairs // 50):
        left, other = rng.integers(0, len(images), (2, 50))
        keep = images.labels[left] != images.labels[other]
        left, other = left[keep], other[keep]
        sides = [torch.stack([torch.from_numpy(np.array(transform(images.picture(int(i)))[0])) for i in who])
                 for who in (left, other)]  # fmt: skip
        pixels = [side.permute(0, 3, 1, 2).float() / 255 for side in sides]
        half = pixels[0].shape[-1] // 2
        mixed = torch.cat((pixels[0][..., :half], pixels[1][..., half:]), -1)
        mixed = (mixed - mean) / std
        own = tuple(about.token_class_names) == tuple(about.class_names)
        answers = model(mixed).token_logits if own else model.cell_logits(mixed)
        said = answers.argmax(-1)  # [B, h, w]
        middle = said.shape[2] // 2
        truth = torch.from_numpy(np.stack((images.labels[left], images.labels[other]), 1))
        for i, (here, there) in enumerate(((0, 1), (1, 0))):
            counts[i] += int((said[:, :, :middle] == truth[:, here, None, None]).sum())
            counts[i] += int((said[:, :, middle:] == truth[:, there, None, None]).sum())
        total += said.numel()
    return 100 * counts[0] / total, 100 * counts[1] / total
