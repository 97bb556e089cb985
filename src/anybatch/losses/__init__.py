"""Losses as sums with weights: by torch's own names, or written by the user."""
