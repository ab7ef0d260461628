"""Text around a model: tokenizer, chat template and generation config. Imports no torch."""
