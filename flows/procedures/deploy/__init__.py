"""One stack on one machine."""
