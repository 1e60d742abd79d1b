"""Rewards without reward code in the agent: graders, and the process that posts what they decide."""
