"""A language model as a judge, behind chat endpoints: settings, requests, cache, verdicts, prompts."""
