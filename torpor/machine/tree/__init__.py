"""A workspace's tree on a machine's disk: walking, reading and writing it."""
