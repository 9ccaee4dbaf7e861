"""Samplers: what `sampler.py` asks for, and those that write tokens here, on an endpoint or from a script."""
