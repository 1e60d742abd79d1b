"""The entries of the table, by where the agent comes from."""
