"""Benches that prove a claim, beside those that users run."""
