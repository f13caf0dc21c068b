"""The Textual apps: `localgen tui` and `localgen top`. They use `localgen.client`."""
