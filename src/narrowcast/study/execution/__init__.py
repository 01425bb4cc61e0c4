"""Running a study: ranks, cases and results."""
