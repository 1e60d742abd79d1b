"""The `turnwise` command and its subcommands."""
