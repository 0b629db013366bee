"""Copies between the memories of ranks of one machine, which leave a GPU's multiprocessors to others."""
