"""Other projects' tools on Turnwise: one short module each, imported by nothing else in this project."""
