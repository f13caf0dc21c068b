"""Files that quantization reads and writes: checkpoints, packed weights, work folders."""
