"""Annotators, which score every cell of an image, and the job that fills a store with their score maps."""
