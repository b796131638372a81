"""The sampler: a process of its own that writes what the machine does into a ring file."""
