"""The trainer process: claim → batch → update → checkpoint → publish."""
