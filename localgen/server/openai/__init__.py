"""OpenAI's protocol: schemas, tools, responses."""
