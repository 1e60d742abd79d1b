"""`turnwise certify`: the command, the certificate that it writes, and the text that an engine computes for it."""
