"""Objects in images: boxes, masks and classes."""
