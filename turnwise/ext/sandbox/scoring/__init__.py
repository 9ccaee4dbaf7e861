"""Rewards that run code in the sandbox: tests and assertions against what the policy wrote."""
