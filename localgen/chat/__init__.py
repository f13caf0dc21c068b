"""Chats without a screen: conversations, settings, slash commands, and where chats are stored."""
