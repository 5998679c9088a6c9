"""Several models and several replicas: which is loaded, which one gets a request, and how many."""
