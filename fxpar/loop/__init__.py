"""The training loop and evaluation: what is around steps."""
