"""What `localgen quantize` does between the command and quant/: names, verdicts, advice."""
