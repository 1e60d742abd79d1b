"""Conversations of other tools into the store, as sessions for SFT, DPO and judges; one module per format.

Nothing that is imported counts as sampled by a policy: its turns are untrainable for reinforcement learning and have no
policy version.
"""
