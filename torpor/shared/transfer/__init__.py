"""Objects by grants: presigned requests over HTTP."""
