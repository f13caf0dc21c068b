"""The interactive terminal chat: line editor, command loop and streamed answers."""
