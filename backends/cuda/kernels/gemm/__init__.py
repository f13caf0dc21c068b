"""Matrix products with dense, int4 and FP8 weights."""
