"""The database's migrations: a linear list of revisions, installed with the package so that a wheel can migrate."""
