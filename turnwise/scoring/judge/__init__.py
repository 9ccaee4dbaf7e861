"""A language model as a judge, behind OpenAI-compatible chat endpoints: settings, requests, cache, verdicts, prompts."""
