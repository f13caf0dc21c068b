"""The chat in a terminal: a conversation, its commands, and answers drawn as they come."""
