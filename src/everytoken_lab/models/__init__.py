"""Open any classifier, and run it fast."""
