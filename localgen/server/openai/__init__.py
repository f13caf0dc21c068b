"""The OpenAI API: request schemas, tools, responses."""
