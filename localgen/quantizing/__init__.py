"""Quantization between who asks for it and quant/: names, one run and its events, verdicts."""
