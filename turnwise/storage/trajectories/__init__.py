"""Trajectory files: their columns, how episodes become rows and are read again, older formats too."""
