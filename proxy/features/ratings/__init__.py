"""Ratings: who is asked about which session, and what the asked say of each version."""
