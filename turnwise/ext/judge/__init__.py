"""A language model as a judge, behind chat endpoints, and what is scored with it: answers, and turns with tools."""
