"""Floor 4: the Textual screens. They know `localgen.client` and nothing below it."""
