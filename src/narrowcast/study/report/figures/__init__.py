"""The figures of a report, in the order in which they are shown."""
