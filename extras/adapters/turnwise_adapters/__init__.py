"""Other projects' tools on Turnwise: one short module each, over the client alone."""
