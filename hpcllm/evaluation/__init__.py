"""Evaluation of a model: its loss on held-out text and bits per byte (held_out.py)."""
