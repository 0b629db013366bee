"""Weights of a rank: what it holds of them, their initial values, checkpoints, optimizer state, saved trainings."""
