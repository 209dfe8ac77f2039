"""A classifier's token head, read as a segmenter without any training.

A model that was trained with token labels answers for every token, so it has learned to segment by the way. Its classes
are those of the annotator; the dataset of masks has others. A class map says which belong together: the score of a
class of the data is the probability of all classes of the head that are mapped to it (the sum, in logarithms).
Names are matched by themselves (synonyms may be separated by commas or semicolons); a JSON, YAML or CSV file says more:

    {"person": ["groom", "scuba diver"], "dog": ["Pug", "beagle"], "background": "*"}

"*" is every class of the head that is not named otherwise. Classes of the data that nothing is mapped to are never
answered, and their IoU is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.models import TokenModel
from everytoken_lab.classes import map_to_dataset
from everytoken_lab.dense.segment.model import resize
from everytoken_lab.models.open import Description, open_model

_NEVER = -1e4  # a finite log probability, so that interpolation stays finite


class TokenSegmenter(nn.Module):
    """Images -> log probabilities of the data's classes for every pixel, from the tokens of a classifier.

    Args:
        model: its token view. mapping: of `map_to_dataset`. classes: of the data.
        head: "token", the token head; "class", the class head applied to every cell.
    """

    def __init__(
        self, model: TokenModel, mapping: Tensor, classes: int, head: Literal["token", "class"] = "token"
    ) -> None:
        super().__init__()
        self.model, self.head = model, head
        used = torch.nonzero(mapping >= 0)[:, 0]
        member = torch.zeros(len(used), classes)
        member[torch.arange(len(used)), mapping[used]] = 1
        self.register_buffer("used", used)
        self.register_buffer("member", member)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K, H, W]: log of the summed probabilities."""
        logits = self.model.cell_logits(images) if self.head == "class" else self.model(images).token_logits
        assert logits is not None
        probabilities = logits.float().softmax(-1)[..., self.get_buffer("used")]
        scores = (probabilities @ self.get_buffer("member")).log().clamp(min=_NEVER)
        return resize(scores.permute(0, 3, 1, 2), (images.shape[-2], images.shape[-1]))


def load_token_segmenter(
    source: str,
    data_names: Sequence[str],
    path: str = "",
    head: Literal["token", "class"] = "token",
    architecture: str = "",
    img_size: int | None = None,
) -> tuple[TokenSegmenter, Description, Tensor]:
    """A classifier's run or weights as a segmenter of the classes `data_names`, its description, and the class map."""
    opened = open_model(source, architecture=architecture, img_size=img_size)
    model, classes = opened.model, opened.classes
    if head == "token":
        if model.token_head is None and not model.uses_own_head:
            raise EverytokenError(
                f'{source} has no token head: it was not trained with token labels. head "class" reads its class head '
                "at every cell instead"
            )
        classes = opened.token_classes
    classes = classes.or_imagenet()
    names = classes.names or [f"class {i}" for i in range(classes.count)]  # a class map can name them by number
    mapping = torch.tensor(map_to_dataset(names, data_names, path), dtype=torch.int64)
    return TokenSegmenter(model, mapping, len(data_names), head).eval(), opened.info, mapping
