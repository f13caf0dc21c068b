"""`localgen tui`: sessions side by side, their transcripts, and one prompt for all of them."""
