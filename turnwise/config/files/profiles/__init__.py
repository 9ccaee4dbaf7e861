"""Launch profiles: how much of a machine there is, as values for other keys; `profile=NAME` takes one."""
