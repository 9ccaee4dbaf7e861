"""TRL's reward functions as scorers: what was written for GRPOTrainer scores trajectories here, unchanged."""
