"""`python -m turnwise`: the `turnwise` command, where its script is not on the path."""

from turnwise.commands.cli import main

main()
