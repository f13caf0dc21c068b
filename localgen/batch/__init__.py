"""Batch jobs: many requests of a file in OpenAI's batch format, in the background."""
