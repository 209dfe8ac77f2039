"""A task where every token matters and the truth is known: does each cell of a collage name its own tile?

A collage is a square of photos, enlarged; its tokens are the cells of a frozen, pretrained network. Three linear heads
on the same tokens of the same training collages differ only in the labels that they learn from:

    image labels    the mean of the tokens learns what fraction of the collage each class has
    one for all     every token learns these fractions
    token labels    every token learns what the machine annotator says about its own cell: the classifier of whole
                    photos that the demo has just trained, which has never seen a collage

All are judged by the true class under the centre of each cell, on collages of other photos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import normalise
from everytoken.keyed import generator
from everytoken_lab import draw
from everytoken_lab.models.open import OpenModel
from everytoken_lab.stats import Estimate, mean

SIDE, TILE = 3, 96  # tiles, and pixels of each
TRAIN, TEST = 200, 100  # collages
CELLS = 4000  # that a head learns from, at most
PENALTY = 1e-3
WAYS = ("image labels", "one for all", "token labels")


@dataclass(frozen=True)
class Collages:
    """Pictures uint8 [n, H, W, 3] and the class of each tile [n, SIDE, SIDE]."""

    pictures: np.ndarray
    tiles: np.ndarray

    def truth(self, grid: Sequence[int]) -> np.ndarray:
        """The class under the centre of each cell, [n, h, w]."""
        rows, columns = (((np.arange(side) + 0.5) / side * SIDE).astype(int) for side in grid)
        return self.tiles[:, rows][:, :, columns]


@dataclass(frozen=True)
class Outcome:
    """What a head says about the test collages, and the percentage of right cells of each collage."""

    way: str
    cells: np.ndarray  # [n, h, w] classes
    right: Estimate

    @property
    def words(self) -> str:
        """The percentage with its interval over collages."""
        return f"{self.right.value:.1f} % of the cells are right [{self.right.low:.1f}, {self.right.high:.1f}]"


def make_collages(pixels: np.ndarray, labels: np.ndarray, count: int, name: str) -> Collages:
    """Of photos drawn at random."""
    chosen = generator(0, "collages", name).integers(0, len(labels), (count, SIDE * SIDE))
    pictures = np.empty((count, SIDE * TILE, SIDE * TILE, 3), np.uint8)
    for picture, photos in zip(pictures, chosen, strict=True):
        for place, number in enumerate(photos.tolist()):
            row, column = (TILE * i for i in divmod(place, SIDE))
            tile = Image.fromarray(pixels[number]).resize((TILE, TILE), Image.Resampling.BICUBIC)
            picture[row : row + TILE, column : column + TILE] = np.asarray(tile)
    return Collages(pictures, labels[chosen].reshape(count, SIDE, SIDE))


@torch.no_grad()
def over_batches(function: Callable[[Tensor], Tensor], opened: OpenModel, pictures: np.ndarray) -> Tensor:
    """What a function of normalised images gives for all pictures."""
    parts = []
    for start in range(0, len(pictures), 8):
        batch = torch.from_numpy(pictures[start : start + 8]).permute(0, 3, 1, 2)
        parts.append(function(normalise(batch, opened.info.mean, opened.info.std)))
    return torch.cat(parts)


def compare_labels(train: Collages, test: Collages, opened: OpenModel) -> list[Outcome]:
    """The three heads on the test collages."""
    tokens, others = (over_batches(lambda x: opened.model(x).grid, opened, c.pictures) for c in (train, test))
    machine = over_batches(lambda x: opened.model.class_and_cell_logits(x)[1], opened, train.pictures)
    classes, grid = machine.shape[-1], tokens.shape[1:3]
    centre, scale = tokens.mean((0, 1, 2)), tokens.std()
    tokens, others = (tokens - centre) / scale, (others - centre) / scale
    fractions = F.one_hot(torch.from_numpy(train.tiles), classes).float().mean((1, 2))
    some = torch.from_numpy(generator(0, "cells").permutation(tokens[..., 0].numel())[:CELLS])

    def cells(values: Tensor) -> Tensor:
        return values.flatten(0, 2)[some]

    everywhere = fractions[:, None, None].expand(-1, *grid, -1)
    lessons = (
        (tokens.mean((1, 2)), fractions),
        (cells(tokens), cells(everywhere)),
        (cells(tokens), cells(machine).softmax(-1)),
    )
    truth, outcomes = test.truth(grid), []
    for way, (x, target) in zip(WAYS, lessons, strict=True):
        weight, bias = fit(x, target)
        answers = (others @ weight + bias).argmax(-1).numpy()
        outcomes.append(Outcome(way, answers, mean((100 * (answers == truth).mean((1, 2))).tolist())))
    return outcomes


def fit(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A linear head on tokens [n, D] for soft labels [n, K]: its weight [D, K] and bias [K]."""
    weight = torch.zeros(x.shape[1], target.shape[1], requires_grad=True)
    bias = torch.zeros(target.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, target) + PENALTY * weight.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def collage_picture(test: Collages, outcomes: Sequence[Outcome], names: Sequence[str], count: int = 3) -> Image.Image:
    """The first collages beside what each head says about their cells."""
    colours = draw.ClassColours(names)
    cards = []
    for i in range(count):
        photo = Image.fromarray(test.pictures[i])
        panels, truth = [draw.Panel("collage", photo)], test.truth(outcomes[0].cells.shape[1:])[i]
        for outcome in outcomes:
            cells = outcome.cells[i]
            painted, _ = draw.class_picture(photo, cells, np.ones(cells.shape), names.__getitem__, colours)
            panels.append(draw.Panel(outcome.way, painted, f"{(cells == truth).mean():.0%} of the cells right"))
        _, legend = draw.class_picture(photo, truth, np.ones(truth.shape), names.__getitem__, colours)
        cards.append(draw.draw_card(draw.Card("", [draw.Row("", panels, legend)], side=SIDE * TILE)))
    return draw.draw_sheet("Does every cell name its own tile?", "one linear head for each kind of label", cards)
