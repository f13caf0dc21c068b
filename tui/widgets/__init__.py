"""Widgets that every screen uses: dialogs, pickers, footer, numbers."""
