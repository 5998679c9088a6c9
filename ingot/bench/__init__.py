"""How fast things are: timing, the machine's peaks, and comparisons with its limit and peers."""
