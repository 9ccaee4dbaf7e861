"""Trajectory -> reward: scorers, and which one a data source gets."""
