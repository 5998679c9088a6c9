"""Several replicas of the engine: which one gets a request, and how many there should be."""
