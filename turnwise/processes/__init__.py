"""The processes of a whole stack, and how they are kept running."""
