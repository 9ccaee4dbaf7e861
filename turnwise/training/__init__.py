"""Trajectories -> gradient: sequences, packing and the supervised step."""
