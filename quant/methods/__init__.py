"""Quantization methods: AWQ, GPTQ, SmoothQuant, round to nearest, FP8."""
