"""Evaluations of what a model sees: V*Bench, HR-Bench and MathVista from their published files, with their own scorer.

`published` reads the files, `prepare` writes rows and images, `scoring` compares answers, `tasks` has the three tasks.
"""
