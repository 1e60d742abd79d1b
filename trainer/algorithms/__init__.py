"""Learning algorithms, each in one file: a class that turns groups into advantages, and tokens into a loss."""
