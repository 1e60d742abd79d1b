"""The page for people, and the lists, counts and changes that it reads."""
