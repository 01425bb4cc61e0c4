"""FSDP2 through codecs."""
