"""What engines of others have in common: servers that are started or attached to, replicas, and their GPUs."""
