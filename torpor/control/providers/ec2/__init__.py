"""AWS EC2."""
