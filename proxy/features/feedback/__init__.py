"""What people say about replies: its routes, and the rewards of thumbs."""
