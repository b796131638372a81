"""Object stores, as the control side uses them."""
