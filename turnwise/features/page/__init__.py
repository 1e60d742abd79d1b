"""What the page and the lists for people read of the store: counts, changes, searches, and what engines did."""
