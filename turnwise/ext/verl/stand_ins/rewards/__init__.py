"""Rewards of verl's own data sources, as its reward_score package gives them."""
