"""Benchmarks of constrained answers."""
