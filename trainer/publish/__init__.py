"""Policy versions on disk, and how they are handed over."""
