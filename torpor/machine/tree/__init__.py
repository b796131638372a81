"""A workspace's tree on a machine's disk: walking it, reading it, and writing it anew."""
