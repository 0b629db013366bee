"""Weights of a run: how they begin."""
