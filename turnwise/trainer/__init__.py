"""What the training loop is made of: weights kept in step, samples drawn in order, the run and its display."""
