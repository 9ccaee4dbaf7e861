"""Environments of the verifiers package as tasks: `task=verifiers:ENV_ID`."""
