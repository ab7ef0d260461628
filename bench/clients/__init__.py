"""Whether a load generator measures the server or itself: `python -m bench.clients --help`."""
