"""Cohere 2 (Command R7B) for the Radix runtime."""
