"""Files of a quantization: checkpoints, packed weights, the work folder."""
