"""Features of DDP and FSDP2 that people combine with a wire: a table for each, and what both have in common."""
