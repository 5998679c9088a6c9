"""Facts and plumbing that every other part of ingot may use; imports no torch."""
