"""What the results of a study amount to."""
