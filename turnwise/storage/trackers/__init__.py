"""Where else a run's numbers go: a terminal, or a service. metrics.jsonl stays the truth."""
