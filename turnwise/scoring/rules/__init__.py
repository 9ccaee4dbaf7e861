"""Rewards by rule: numbers, mathematics, texts, and formats."""
