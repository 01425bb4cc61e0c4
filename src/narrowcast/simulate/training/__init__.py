"""A data-parallel training in one process."""
