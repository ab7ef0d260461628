"""KV pages: who owns them (page_allocator, radix_cache, request_table) and where they lie."""
