"""Policies of tenants by name, and the names of models that calls may ask for."""
