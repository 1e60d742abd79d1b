"""How much a key and a tenant may use: concurrent calls and rates, and token budgets."""
