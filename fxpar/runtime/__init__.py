"""Programs on real processes: one rank's module, its calls and its sharded tensors."""
