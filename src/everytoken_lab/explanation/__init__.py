"""Pictures and numbers of what a model sees: what its tokens say, which regions support a class, whose a mix is.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken_lab.explanation.cards import ExplainOptions, Explanation, explain
    from everytoken_lab.explanation.mixed import MixStory, draw_box, follow_mix
    from everytoken_lab.explanation.saliency import NoAttentionError, choose_method, record_attention, relevance
    from everytoken_lab.explanation.tokens import summarize_cells, token_probabilities

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken_lab.explanation.cards": ["Explanation", "ExplainOptions", "explain"],
        "everytoken_lab.explanation.mixed": ["MixStory", "draw_box", "follow_mix"],
        "everytoken_lab.explanation.saliency": ["NoAttentionError", "choose_method", "record_attention", "relevance"],
        "everytoken_lab.explanation.tokens": ["summarize_cells", "token_probabilities"],
    },
)
__all__ = [
    "ExplainOptions",
    "Explanation",
    "MixStory",
    "NoAttentionError",
    "choose_method",
    "draw_box",
    "explain",
    "follow_mix",
    "record_attention",
    "relevance",
    "summarize_cells",
    "token_probabilities",
]
