"""Open any classifier, and run it fast."""

HUB = ("hf-hub:", "local-dir:")
"""Prefixes of models that timm reads from elsewhere."""
PUBLISHED = ("timm:", "registry:", *HUB)
"""Prefixes of weights that are not paths; none were trained on a folder of the user's."""
