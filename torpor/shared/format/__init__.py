"""The snapshot format (docs/format.md): names, keys, manifests and what a reader refuses."""
