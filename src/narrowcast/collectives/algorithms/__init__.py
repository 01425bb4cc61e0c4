"""All-reduce algorithms: one file each, and one line in the registry."""
