"""What a rank runs of a pipeline: the stages of a training step, and of a forward alone."""
