"""Robustness and generalisation: test sets, corruptions, attacks, and one table of them."""
