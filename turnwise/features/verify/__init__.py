"""Proof that what is stored is what happened: structure of the chains, logprobs, and the weights' files."""
