"""The access log, and spans of requests."""
