"""What runs on the rented machine."""
