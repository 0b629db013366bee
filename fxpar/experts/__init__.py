"""Layers of experts: what recognises them, and what compiles them."""
