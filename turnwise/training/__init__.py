"""Trajectories -> gradient: sequences, advantages, packing, the update; and the run itself, from start to resume."""
