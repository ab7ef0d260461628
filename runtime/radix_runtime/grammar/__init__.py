"""Answers that follow a grammar: its compilation and the masks of the tokens that it allows."""
