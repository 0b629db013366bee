"""What programs cost: bytes, FLOPs, seconds and what a ring sends. Each formula and constant stands here once."""
