"""A small ViT that was trained, here and now, to name the colours of two squares hidden in noise.

Two at a time, because then each has to be weighed against the other: a model that is quite sure of its only answer has
no gradient left that would tell where it came from.
"""

import timm
import torch

SIZE, PATCH = 32, 4
COLOURS = torch.tensor([[2.0, -1, -1], [-1, 2, -1], [-1, -1, 2], [1, 1, -2]])


def planted(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise with two squares of 8 px: images [B, 3, 32, 32], their classes [B, 2], the cells of each [B, 2, 8, 8]."""
    rng = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 3, SIZE, SIZE, generator=rng)
    labels = torch.rand(count, len(COLOURS), generator=rng).argsort(1)[:, :2]
    corners = torch.randint(SIZE // PATCH - 1, (count, 2, 2), generator=rng)
    corners[:, :, 1] = torch.randint(3, (count, 2), generator=rng) + torch.tensor([0, 4])  # left and right half
    mask = torch.zeros(count, 2, SIZE // PATCH, SIZE // PATCH)
    for i in range(count):
        for j, (row, column) in enumerate(corners[i].tolist()):
            mask[i, j, row : row + 2, column : column + 2] = 1
            y, x = row * PATCH, column * PATCH
            images[i, :, y : y + 8, x : x + 8] += COLOURS[labels[i, j]][:, None, None]
    return images, labels, mask


def train(model: torch.nn.Module, steps: int) -> torch.nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        images, labels, _ = planted(32, seed=step)
        target = torch.zeros(32, len(COLOURS)).scatter_(1, labels, 0.5)
        loss = torch.nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def tiny_vit(**more):
    small = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **(small | more))
