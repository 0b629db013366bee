"""The mesh: axes of ranks, and which ranks communicate with which."""
