"""Learners: what `learner.py` asks for, and those that train in this process and over several."""
