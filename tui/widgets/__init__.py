"""Widgets shared by all screens: dialogs, pickers, footer, number formats."""
