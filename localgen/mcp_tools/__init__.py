"""MCP servers as tools of a chat: the user's file of servers, connections, permissions."""
