"""The serving processes: HTTP front end, detokenizer and the supervisor over them. No torch."""
