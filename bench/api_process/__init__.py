"""What a streamed token costs the API process of a server: `python -m bench.api_process --help`."""
