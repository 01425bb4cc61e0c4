"""Local updates, exchanged now and then."""
