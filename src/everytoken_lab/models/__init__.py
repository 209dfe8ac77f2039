"""Open any classifier, and run it fast."""

HUB = ("hf-hub:", "local-dir:")
"""How the names of models begin that timm reads from elsewhere."""
PUBLISHED = ("timm:", "registry:", *HUB)
"""How the names of weights that are no paths begin; they were not trained on a folder of the user's."""
