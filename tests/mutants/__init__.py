"""Deliberate faults and what runs them: run.py."""
