"""The HTTP server: routes, and the way from a request to the engine and back."""
