"""Derivatives of operations as graphs: what PyTorch's autograd does of a call, traced once for each distinct call."""
