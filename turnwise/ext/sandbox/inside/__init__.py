"""What runs in the sandboxed processes: standard library only, and nothing of the host's memory or environment."""
