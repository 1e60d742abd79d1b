"""Ratings: whom people are asked about, with which probability, and what a policy's head predicts of the others."""
