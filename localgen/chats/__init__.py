"""Chats apart from any screen: what was said, settings, commands, and where chats are kept."""
