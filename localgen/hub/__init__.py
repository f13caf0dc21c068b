"""Model names, the Hugging Face hub and its cache: resolve, download and remove models."""
