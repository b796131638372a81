"""The life of a rented machine, from the request to its proven end."""
