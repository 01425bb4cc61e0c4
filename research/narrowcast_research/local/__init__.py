"""What local updates cost: rare exchanges on text, neighbours instead of all on pictures."""
