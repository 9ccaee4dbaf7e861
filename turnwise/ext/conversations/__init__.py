"""Files of conversations to fine-tune on, in the layouts that others write, and which of their turns are learned."""
