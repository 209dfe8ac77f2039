"""A classifier's token head, read as a segmenter without any training.

A model that was trained with token labels answers for every token, so it has learned to segment by the way. Its classes
are those of the annotator; the data set of masks has others. A class map says which belong together: the score of a
class of the data is the probability of all classes of the head that are mapped to it (the sum, in logarithms).
Names are matched by themselves (synonyms may be separated by commas or semicolons); a JSON file can say more:

    {"person": ["groom", "scuba diver"], "dog": ["Pug", "beagle"], "background": "*"}

"*" is every class of the head that is not named otherwise. Classes of the data that nothing is mapped to are never
answered, and their IoU is 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models import TokenModel
from everytoken.models.open import OpenModel, open_model
from everytoken.tasks.segment.heads import resize

_NEVER = -1e4  # a finite log probability, so that interpolation stays finite


def synonyms(name: str) -> set[str]:
    """'building;edifice' -> {'building', 'edifice'}; lower case, no underscores."""
    parts = name.replace(";", ",").split(",")
    return {" ".join(part.replace("_", " ").lower().split()) for part in parts} - {""}


def class_map(head: Sequence[str], data: Sequence[str], path: str = "") -> Tensor:
    """int64 [classes of the head]: the class of the data that each belongs to, -1 for none.

    Args:
        head, data: names of both.
        path: JSON file, see above; empty: by equal names. Names of the head in it may be numbers of classes.
    """
    out = torch.full((len(head),), -1, dtype=torch.int64)
    if path:
        return _from_file(out, head, data, path)
    index: dict[str, int] = {}
    for i, name in enumerate(data):
        for word in synonyms(name):
            index.setdefault(word, i)
    for j, name in enumerate(head):
        found = [index[word] for word in synonyms(name) if word in index]
        if found:
            out[j] = min(found)
    if bool((out < 0).all()):
        raise EverytokenError(
            f"no class of the token head (such as {', '.join(list(head)[:3])}) has the name of a class of the data "
            f"(such as {', '.join(list(data)[:3])}). Say which belong together with --class-map FILE.json"
        )
    return out


def read_class_map(path: str) -> dict[str, Any]:
    """Class of the data -> classes of the head, as a --class-map file says it."""
    try:
        content: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise EverytokenError(f"the class map {path} (--class-map) cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EverytokenError(f'{path}: a class map looks like {{"class of the data": ["class of the head", ...]}}')
    return content


def _from_file(out: Tensor, head: Sequence[str], data: Sequence[str], path: str) -> Tensor:
    content = read_class_map(path)
    words: dict[str, int] = {}
    for j, name in enumerate(head):
        for word in (name, *synonyms(name)):
            words.setdefault(word, j)
    rest = -1
    for name, members in content.items():
        if name not in data:
            raise EverytokenError(f"{path}: the data has no class {name!r}.{did_you_mean(name, data)}")
        if members == "*":
            rest = list(data).index(name)
            continue
        for member in [members] if isinstance(members, str | int) else members:
            j = member if isinstance(member, int) else words.get(member, words.get(member.lower(), -1))
            if not 0 <= j < len(head):
                near = did_you_mean(str(member), head)
                raise EverytokenError(f"{path}: the token head has no class {member!r} (for {name!r}).{near}")
            out[j] = list(data).index(name)
    return torch.where(out < 0, torch.full_like(out, rest), out)


class TokenSegmenter(nn.Module):
    """Images -> log probabilities of the data's classes for every pixel, from the tokens of a classifier.

    Args:
        model: its token view. mapping: of `class_map`. classes: of the data.
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
        some = logits.float().softmax(-1)[..., self.get_buffer("used")]
        scores = (some @ self.get_buffer("member")).log().clamp(min=_NEVER)
        return resize(scores.permute(0, 3, 1, 2), (images.shape[-2], images.shape[-1]))


def load_token_segmenter(
    source: str, data: Sequence[str], path: str = "", head: Literal["token", "class"] = "token",
    architecture: str = "", img_size: int | None = None,
) -> tuple[TokenSegmenter, OpenModel, Tensor]:  # fmt: skip
    """A classifier's run or weights as a segmenter of the classes `data`, the loaded model, and the class map."""
    loaded = open_model(source, architecture=architecture, img_size=img_size)
    model, about = loaded.model, loaded.info
    names = list(about.class_names)
    if head == "token":
        own: Any = getattr(model.backbone, "aux_head", None)
        if model.token_head is None and not model.uses_own_head:
            if own is None:
                raise EverytokenError(
                    f"{source} has no token head: it was not trained with token labels. --head class reads its class "
                    "head at every cell instead"
                )
            model.add_token_head(own.out_features)
        else:
            names = list(about.token_class_names) or names
    count = _outputs(model, head)
    if len(names) != count:  # foreign weights: the class map has to name classes by number
        names = [f"class {i}" for i in range(count)]
    mapping = class_map(names, data, path)
    return TokenSegmenter(model, mapping, len(data), head).eval(), loaded, mapping


def _outputs(model: TokenModel, head: str) -> int:
    if head == "class":
        return int(model.backbone.num_classes)  # type: ignore[arg-type]
    layer: Any = model.backbone.aux_head if model.uses_own_head else model.token_head
    return int(layer.out_features)
