"""Tool calls in a model's text: what a format is, which one a model writes, and the readers that formats share."""
