"""What this device can hold: resolved load options, sizes of context and KV cache."""
