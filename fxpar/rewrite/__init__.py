"""Helpers that passes share; only passes call them."""
