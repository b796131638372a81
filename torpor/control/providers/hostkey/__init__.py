"""HOSTKEY."""
