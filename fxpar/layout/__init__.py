"""What each rank holds of a value: placements, their algebra over sizes, and blocks."""
