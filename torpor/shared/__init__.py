"""What runs on both sides: values, errors, the format, codecs, the wire."""
