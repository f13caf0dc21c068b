"""The paged KV cache: free pages, known prefixes, which pages belong to which sequence."""
