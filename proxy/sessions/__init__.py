"""Which turn a request extends, and the exact prompt for it."""
