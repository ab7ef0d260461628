"""Text around a model: tokenizer, chat template, generation config, detokenizer, choices."""
