"""A model that computes in low precision."""
