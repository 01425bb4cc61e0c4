"""What runs a call: channels, agreement between ranks, streams and messages."""
