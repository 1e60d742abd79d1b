"""The database's history: one linear line of revisions, installed with the package so that a wheel can migrate."""
