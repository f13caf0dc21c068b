"""Chats without a user interface: conversations, parameters, slash commands and storage."""
