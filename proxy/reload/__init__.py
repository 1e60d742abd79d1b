"""New weights under running agents."""
