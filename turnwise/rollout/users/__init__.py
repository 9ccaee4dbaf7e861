"""Simulated users, one file each; the file name is the value of `rollout.interaction`."""
