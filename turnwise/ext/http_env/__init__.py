"""Environments behind a server: it opens the conversation, answers every message and gives the reward (`http_env`)."""
