"""What runs beside a repository's tests, in shell sessions: sent in as texts, standard library only."""
