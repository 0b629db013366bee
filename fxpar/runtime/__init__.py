"""Programs on real processes: the parallel module and its calls."""
