"""The demo: a small task that an agent learns from its rewards."""
