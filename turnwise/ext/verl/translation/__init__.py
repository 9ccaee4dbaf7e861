"""Configs and launch scripts of verl as configs of ours: rules by key, and what bash makes of a script."""
