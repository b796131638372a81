"""Deploying: what a server needs on a machine, its environment in the store, and its proof."""
