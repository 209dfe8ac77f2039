"""Pictures and numbers of what a model sees: what its tokens say, which places speak for a class, whose a mix is."""

from everytoken.explain.attention import NoAttentionError, see_attention
from everytoken.explain.faithfulness import area_under, deletion_curve, insertion_curve, mass_inside, points_inside
from everytoken.explain.mixed import MixStory, draw_box, follow_mix
from everytoken.explain.relevance import choose_method, relevance
from everytoken.explain.tokens import summarize_cells, token_probabilities

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
