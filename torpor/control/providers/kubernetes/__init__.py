"""A Kubernetes cluster, with Kueue where it has that."""
