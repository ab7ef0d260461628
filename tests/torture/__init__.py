"""`make torture`: what `radix serve` does when it is killed, stopped, flooded and lied to."""
