"""Repairing repositories: the tools bash, edit and finish, tests as the reward, a task, and a server of them."""
