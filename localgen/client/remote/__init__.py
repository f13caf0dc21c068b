"""Models on other servers: anything that speaks OpenAI's protocol, at a URL."""
