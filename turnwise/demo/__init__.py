"""The demo: a small world in which an agent can be watched getting better."""
