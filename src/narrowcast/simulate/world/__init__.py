"""N workers in one process."""
