"""The HTTP surface: each route parses, calls and answers; what it does lives elsewhere."""
