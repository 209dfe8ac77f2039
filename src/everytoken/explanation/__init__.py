"""Pictures and numbers of what a model sees: what its tokens say, which places speak for a class, whose a mix is."""

from everytoken.explanation.attention import NoAttentionError, see_attention
from everytoken.explanation.faithfulness import area_under, deletion_curve, insertion_curve, mass_inside, points_inside
from everytoken.explanation.mixed import MixStory, draw_box, follow_mix
from everytoken.explanation.relevance import choose_method, relevance
from everytoken.explanation.tokens import summarize_cells, token_probabilities

__all__ = [
    "MixStory",
    "NoAttentionError",
    "area_under",
    "choose_method",
    "deletion_curve",
    "draw_box",
    "follow_mix",
    "insertion_curve",
    "mass_inside",
    "points_inside",
    "relevance",
    "see_attention",
    "summarize_cells",
    "token_probabilities",
]
