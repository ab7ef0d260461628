"""The processes of `radix serve`: HTTP, scheduler, detokenizer, and the supervisor over them."""
