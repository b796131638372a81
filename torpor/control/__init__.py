"""What runs beside the flows, on the control side."""
