"""Other programs that run a model on the CPU, each behind `Contender`, and how to build them."""
