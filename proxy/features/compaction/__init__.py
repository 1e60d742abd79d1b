"""What formats ask for that changes a conversation before it is sampled: summaries, and edits that clear parts."""
