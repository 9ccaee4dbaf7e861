"""What lets people bring the files of other systems: their rollout dumps become runs."""
