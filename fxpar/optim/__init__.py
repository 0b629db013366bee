"""Optimizers of parallel modules."""
