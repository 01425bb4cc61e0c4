"""What carries bytes: torch.distributed, or MPI."""
