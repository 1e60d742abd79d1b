"""Routes that no engine serves, passed to another server."""
