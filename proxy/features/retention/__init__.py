"""Deletion of sessions, of tenants, and of what is older than the retention."""
