"""Rewards by rule: numbers, mathematics, texts, formats, and the parts of TAPO."""
