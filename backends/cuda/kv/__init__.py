"""The paged KV cache: page pool, prefix tree, and the page table of each sequence."""
