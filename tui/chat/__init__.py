"""The `localgen tui` app: chat sessions, their transcripts, and a shared prompt."""
