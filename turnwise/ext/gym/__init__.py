"""Gymnasium environments as episodes: each answer is an action, each observation a reply (`rollout.agent=gym_env`)."""
