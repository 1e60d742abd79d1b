"""The HTTP server: dialects → continuation → relay → capture → reply."""
