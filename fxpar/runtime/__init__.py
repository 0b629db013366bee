"""Programs on real processes: lowering, the parallel module, state and gradients."""
