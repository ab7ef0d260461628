"""The processes of `radix serve`: their supervisor, the links between them, and what each runs."""
