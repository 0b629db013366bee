"""CUDA graphs of steps: what is recorded once and replayed."""
