"""Consent and redaction: what may be trained and recorded, and what is left of texts."""
