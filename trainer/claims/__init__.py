"""From the database to a batch: which groups are taken, when, and until when they are held."""
