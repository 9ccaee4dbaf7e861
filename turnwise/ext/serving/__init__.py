"""A trained policy for others to talk to: `turnwise serve` answers OpenAI's chat completions with our own sampler."""
