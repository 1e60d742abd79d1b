"""`turnwise verify`: the command, and the checks of what a proxy returns."""
