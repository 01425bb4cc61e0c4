"""Speed, always as a ratio to a ceiling or a peer measured in the same run, and only after the bits were checked."""
