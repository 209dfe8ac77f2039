"""Data: open a dataset, decode, augment with a placement, load batches; seeded per sample."""
