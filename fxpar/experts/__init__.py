"""Layers of experts: what recognises them, their operators, and what compiles them."""
