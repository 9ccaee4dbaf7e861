"""The tools that run the policy's Python in the sandbox, by our name and by another system's."""
