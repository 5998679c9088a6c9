"""Engine processes: starting, supervising and restarting them, and the messages they exchange."""
