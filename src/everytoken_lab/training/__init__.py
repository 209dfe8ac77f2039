"""Training a classifier, with a recipe or without."""
