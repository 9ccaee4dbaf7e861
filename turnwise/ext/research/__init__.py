"""The task `deep_research`: questions over an invented world of articles: search it with tools, answer with sources."""
