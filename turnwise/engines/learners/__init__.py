"""Learners: what `learner.py` asks for, and the one that trains in this process."""
