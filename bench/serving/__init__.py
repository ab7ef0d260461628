"""Whole models: tokens a second of the engine beside other programs, and of the server beside the
engine."""
