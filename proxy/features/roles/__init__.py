"""The roles of chains: what each is for, found from its calls and corrected by later ones or by hand."""
