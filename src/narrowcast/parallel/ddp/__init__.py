"""DistributedDataParallel through codecs."""
