"""Agent loops, one file each; the file name is the loop's name in `agent_name` and `rollout.agent`."""
